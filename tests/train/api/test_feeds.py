"""Iterable datasets and mixtures in scripts."""

import pytest
from datasets import Dataset, IterableDatasetDict

from parity_script import ROWS, TEMPLATE, made_tokenizer
from tiny_models import tiny
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from upweight.errors import UserError

COMMON = {"max_steps": 3, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2, "logging_steps": 1}
TOKENIZER = made_tokenizer(TEMPLATE)


def model():
    ids = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    return tiny("llama", num_hidden_layers=1, vocab_size=len(TOKENIZER), **ids)


def stream(name):
    return Dataset.from_list(ROWS[name]).to_iterable_dataset()


def trainer_of(trainer, config, rows, held_out=None, **settings):
    args = config(output_dir="out", **{**COMMON, **settings})
    given = {"reward_funcs": lengths} if trainer is GRPOTrainer else {}
    return trainer(
        model=model(), args=args, train_dataset=rows, eval_dataset=held_out, processing_class=TOKENIZER, **given
    )


def lengths(completions, **columns):
    return [float(len(str(one))) for one in completions]


CASES = {
    "sft": (SFTTrainer, SFTConfig, "text", {}),
    "sft on turns": (SFTTrainer, SFTConfig, "messages", {"assistant_only_loss": True}),
    "dpo": (DPOTrainer, DPOConfig, "pairs", {}),
    "kto": (KTOTrainer, KTOConfig, "labelled", {"loss_type": "apo_zero_unpaired"}),
    "grpo": (GRPOTrainer, GRPOConfig, "pairs", {"num_generations": 2, "max_completion_length": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_iterable_datasets_are_trained_and_evaluated_on(case):
    trainer, config, rows, settings = CASES[case]
    made = trainer_of(trainer, config, stream(rows), stream(rows), **settings)
    made.train()
    assert made.state.global_step == 3
    metric = "eval_reward" if trainer is GRPOTrainer else "eval_loss"
    of_list = made.evaluate(ROWS[rows])[metric]
    assert made.evaluate()[metric] == pytest.approx(of_list)
    several = made.evaluate(IterableDatasetDict({"first": stream(rows), "second": stream(rows)}))
    assert several[f"{metric.replace('eval_', 'eval_second_')}"] == pytest.approx(of_list)
    made.train()  # a second training begins at the first row again
    assert made.state.global_step == 3


@pytest.mark.parametrize("which", ["train", "eval", "several"])
def test_reference_log_probs_of_a_stream_are_not_precomputed(which):
    rows, held_out = (ROWS["pairs"], stream("pairs")) if which != "train" else (stream("pairs"), None)
    held_out = {"one": held_out} if which == "several" else held_out
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs.*not supported with IterableDataset"):
        trainer_of(DPOTrainer, DPOConfig, rows, held_out, precompute_ref_log_probs=True)


def test_arguments_of_loaders_that_streams_do_not_take():
    with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
        trainer_of(SFTTrainer, SFTConfig, stream("text"), accelerator_config={"dispatch_batches": True})
    made = trainer_of(SFTTrainer, SFTConfig, stream("text"), dataloader_num_workers=2)
    assert made.args.dataloader_num_workers == 0
    assert made.args.accelerator_config.dispatch_batches is False
    assert trainer_of(
        SFTTrainer, SFTConfig, ROWS["text"], stream("text"), dataloader_num_workers=2
    ).args.dataloader_num_workers
    with pytest.raises(UserError, match="max_steps: needed to train on a stream"):
        trainer_of(SFTTrainer, SFTConfig, stream("text"), max_steps=-1)


def test_several_datasets_are_mixed_by_their_weights():
    settings = {"mix": "interleave_over", "mix_weights": {"long": 1, "short": 3}, "per_device_train_batch_size": 4}
    rows = {"long": ROWS["text"], "short": stream("text")}
    made = trainer_of(SFTTrainer, SFTConfig, rows, **settings)
    made.train()
    logs = [line for line in made.state.log_history if "loss" in line]
    assert all({"loss/long", "loss/short"} <= line.keys() for line in logs)
    assert [source.source for source in made.feed.take(8)].count(0) == 2
    made.feed.close()
    with pytest.raises(UserError, match="mix_weights: has other; the datasets are long, short"):
        trainer_of(SFTTrainer, SFTConfig, rows, **settings | {"mix_weights": {"other": 1}})
    with pytest.raises(UserError, match="weight: no effect on datasets that are concatenated"):
        trainer_of(SFTTrainer, SFTConfig, rows, **settings | {"mix": "concatenate"})


def test_a_script_resumes_a_stream_exactly():
    made = trainer_of(SFTTrainer, SFTConfig, stream("text"), max_steps=6, save_steps=2, streaming_buffer_size=3)
    made.train()
    whole = [line["loss"] for line in made.state.log_history if "loss" in line]
    again = trainer_of(SFTTrainer, SFTConfig, stream("text"), max_steps=6, save_steps=2, streaming_buffer_size=3)
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert [line["loss"] for line in again.state.log_history if "loss" in line] == whole
