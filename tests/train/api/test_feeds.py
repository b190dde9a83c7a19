"""Iterable datasets and mixtures in scripts."""

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict, IterableDatasetDict

from light_rewards import checksum
from parity_script import ROWS, TEMPLATE, made_tokenizer
from tiny_models import tiny
from upweight import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from upweight.errors import UserError

COMMON = {"max_steps": 3, "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2, "logging_steps": 1}
TOKENIZER = made_tokenizer(TEMPLATE)
ONLINE = (GRPOTrainer, RLOOTrainer)


def model(kind):
    ids = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    auto, head = transformers.AutoModelForCausalLM, {}
    if kind is RewardTrainer:
        auto, head = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    return tiny("llama", auto, num_hidden_layers=1, vocab_size=len(TOKENIZER), **ids, **head)


def stream(name):
    return Dataset.from_list(ROWS[name]).to_iterable_dataset()


def trainer_of(trainer, config, rows, held_out=None, **settings):
    args = config(output_dir="out", **{**COMMON, **settings})
    given = {"reward_funcs": checksum} if trainer in ONLINE else {}
    return trainer(
        model=model(trainer), args=args, train_dataset=rows, eval_dataset=held_out, processing_class=TOKENIZER, **given
    )


CASES = {
    "sft": (SFTTrainer, SFTConfig, "text", {}),
    "sft on turns": (SFTTrainer, SFTConfig, "messages", {"assistant_only_loss": True}),
    "dpo": (DPOTrainer, DPOConfig, "pairs", {}),
    "kto": (KTOTrainer, KTOConfig, "labelled", {"loss_type": "apo_zero_unpaired"}),
    "reward": (RewardTrainer, RewardConfig, "joined", {}),
    "grpo": (GRPOTrainer, GRPOConfig, "pairs", {"num_generations": 2, "max_completion_length": 4}),
    "rloo": (RLOOTrainer, RLOOConfig, "prompts", {"num_generations": 2, "max_completion_length": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_iterable_datasets_are_trained_and_evaluated_on(case):
    trainer, config, rows, settings = CASES[case]
    made = trainer_of(trainer, config, stream(rows), stream(rows), learning_rate=0.1, **settings)
    before = {name: weight.detach().clone() for name, weight in made.model.named_parameters()}
    made.train()
    assert made.state.global_step == 3
    assert made.state.log_history[-1]["train_loss"] is not None
    same = [name for name, weight in made.model.named_parameters() if torch.equal(weight, before[name])]
    assert not same if trainer not in ONLINE else len(same) < len(before)  # rewards of a group may be equal
    metric = "eval_reward" if trainer in ONLINE else "eval_loss"
    of_list = made.evaluate(ROWS[rows])[metric]
    assert made.evaluate()[metric] == pytest.approx(of_list)
    several = made.evaluate(IterableDatasetDict({"first": stream(rows), "second": stream(rows)}))
    assert several[f"{metric.replace('eval_', 'eval_second_')}"] == pytest.approx(of_list)
    made.train()  # a second training begins at the first row again
    assert made.state.global_step == 3


@pytest.mark.parametrize("form", ["one", "named", "of datasets"])
@pytest.mark.parametrize("case", ["sft", "dpo", "kto", "reward", "grpo"])
def test_a_trainer_on_rows_takes_evaluation_streams_in_every_form(case, form):
    trainer, config, rows, settings = CASES[case]
    forms = {
        "one": stream,
        "named": lambda name: {"data1": stream(name), "data2": stream(name)},
        "of datasets": lambda name: IterableDatasetDict({"data1": stream(name), "data2": stream(name)}),
    }
    made = trainer_of(trainer, config, ROWS[rows], forms[form](rows), **settings)
    assert isinstance(made.eval_dataset, dict) == (form != "one")
    if case == "sft":
        assert "input_ids" in next(iter(made.eval_dataset if form == "one" else made.eval_dataset["data1"]))
    if form != "one":
        assert set(made.eval_dataset) == {"data1", "data2"}
    held, later = made.evaluate(), trainer_of(trainer, config, ROWS[rows], **settings)
    metric = "loss"  # also of a policy gradient, in scripts
    names = [f"eval_{metric}"] if form == "one" else [f"eval_data1_{metric}", f"eval_data2_{metric}"]
    assert set(names) <= set(held)
    given = later.evaluate(forms[form](rows))
    assert [given[name] for name in names] == pytest.approx([held[name] for name in names])
    assert len({round(held[name], 5) for name in names}) == 1


@pytest.mark.parametrize("case", ["grpo", "rloo"])
@pytest.mark.parametrize("form", [stream, lambda name: Dataset.from_list(ROWS[name])])
def test_online_trainers_keep_the_datasets_that_they_were_given(case, form):
    trainer, config, rows, settings = CASES[case]
    train, held_out = form(rows), form(rows)
    made = trainer_of(trainer, config, train, held_out, **settings)
    assert made.train_dataset is train
    assert made.eval_dataset is held_out
    whole = made.evaluate()
    assert whole["eval_samples_per_second"] > 0
    made.eval_dataset = ROWS[rows][:1]  # a script may put others in their place
    assert made.evaluate()["eval_reward"] == pytest.approx(made.evaluate(ROWS[rows][:1])["eval_reward"])


def test_loaders_of_online_trainers_have_the_workers_of_the_arguments_but_for_a_stream():
    trainer, config, rows, settings = CASES["grpo"]
    settings = settings | {"dataloader_num_workers": 4}
    made = trainer_of(trainer, config, ROWS[rows], stream(rows), **settings)
    assert made.get_train_dataloader().num_workers == made.args.dataloader_num_workers == 4
    assert made.get_eval_dataloader().num_workers == 0
    batch = next(iter(made.get_eval_dataloader()))
    assert [row["prompt"] for row in batch] == [row["prompt"] for row in ROWS[rows][: len(batch)]]
    streamed = trainer_of(trainer, config, stream(rows), ROWS[rows], **settings)
    assert streamed.get_train_dataloader().num_workers == streamed.args.dataloader_num_workers == 0


@pytest.mark.parametrize("case", ["grpo", "rloo"])
def test_the_loss_of_an_evaluation_is_that_of_its_completions(case):
    trainer, config, rows, settings = CASES[case]
    made = trainer_of(trainer, config, ROWS[rows], ROWS[rows], beta=0.5, learning_rate=0.1, **settings)
    assert made.evaluate()["eval_loss"] == pytest.approx(0.0, abs=1e-5)  # ratios are 1, and advantages sum to 0
    made.train()
    after = made.evaluate()
    assert after["eval_kl"] > 0
    # The KL is a term of GRPO's loss, and a part of RLOO's rewards.
    expected = 0.5 * after["eval_kl"] if case == "grpo" else 0.0
    assert after["eval_loss"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("which", ["train", "eval", "several", "of datasets"])
@pytest.mark.parametrize(
    ("trainer", "config", "name", "loss"),
    [(DPOTrainer, DPOConfig, "pairs", "sigmoid"), (KTOTrainer, KTOConfig, "labelled", "apo_zero_unpaired")],
)
def test_reference_log_probs_of_a_stream_are_not_precomputed(trainer, config, name, loss, which):
    rows, held_out = (ROWS[name], stream(name)) if which != "train" else (stream(name), None)
    held_out = {"several": {"one": held_out}, "of datasets": IterableDatasetDict({"one": held_out})}.get(
        which, held_out
    )
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs.*not supported with IterableDataset"):
        trainer_of(trainer, config, rows, held_out, precompute_ref_log_probs=True, loss_type=loss)


@pytest.mark.parametrize("case", ["dpo", "kto"])
def test_a_stream_that_comes_later_is_not_precomputed_either(case):
    trainer, config, rows, settings = CASES[case]
    made = trainer_of(trainer, config, ROWS[rows], precompute_ref_log_probs=True, **settings)
    for later in (stream(rows), {"one": stream(rows)}, IterableDatasetDict({"one": stream(rows)})):
        with pytest.raises(ValueError, match=r"precompute_ref_log_probs.*not supported with IterableDataset"):
            made.evaluate(later)
    assert made.evaluate(ROWS[rows])["eval_loss"] > 0


def test_the_rows_of_a_stream_can_be_looked_at_before_training():
    made = trainer_of(DPOTrainer, DPOConfig, stream("pairs"), streaming_buffer_size=1)
    rows = list(made.train_dataset)
    assert len(rows) == len(ROWS["pairs"])
    assert {"prompt_ids", "chosen_ids", "rejected_ids"} <= rows[0].keys()
    made.train()
    assert made.state.global_step == 3


@pytest.mark.parametrize("case", ["sft", "grpo"])
def test_training_data_that_are_missing_or_not_split(case):
    trainer, config, rows, settings = CASES[case]
    with pytest.raises(UserError, match="`train_dataset` is required: a Dataset"):
        trainer_of(trainer, config, None, **settings)
    splits = {"train": Dataset.from_list(ROWS[rows]), "test": Dataset.from_list(ROWS[rows])}
    with pytest.raises(UserError, match=r"and a DatasetDict holds splits. Pass one, as `dataset\['train'\]`"):
        trainer_of(trainer, config, DatasetDict(splits), **settings)
    with pytest.raises(TypeError, match="`train_dataset` must be a `Dataset` or `IterableDataset`"):
        trainer_of(trainer, config, IterableDatasetDict({"train": stream(rows)}), **settings)


@pytest.mark.parametrize("case", ["sft", "grpo"])
def test_arguments_of_loaders_that_streams_do_not_take(case):
    trainer, config, rows, settings = CASES[case]
    for steps in (3, -1):  # it is said first
        dispatched = {"max_steps": steps, "accelerator_config": {"dispatch_batches": True}}
        with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
            trainer_of(trainer, config, stream(rows), **settings, **dispatched)
    made = trainer_of(trainer, config, stream(rows), dataloader_num_workers=2, **settings)
    assert made.args.dataloader_num_workers == 0
    assert made.args.accelerator_config.dispatch_batches is False
    made = trainer_of(trainer, config, ROWS[rows], stream(rows), dataloader_num_workers=2, **settings)
    assert made.args.dataloader_num_workers == 2
    with pytest.raises(UserError, match="max_steps: needed to train on a stream"):
        trainer_of(trainer, config, stream(rows), **settings, max_steps=-1)


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
