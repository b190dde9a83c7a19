"""What a script has as a run from YAML has it: ends that lose nothing, whole checkpoints, the cache, and every key."""

import importlib.util
import json
import math
import os
import signal
import sys
import threading

import pytest
import torch
from transformers import TrainerCallback

from parity_script import ROWS, TEMPLATE, made_tokenizer, said, write_model
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from upweight.errors import UserError
from upweight.runs.checkpoints import is_whole

COMMON = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4,
          "save_strategy": "no", "learning_rate": 1e-2}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE, bos=False), trainer="DPO")
    return tmp_path


def dpo(folder, *, callbacks=None, rows=None, eval_dataset=None, **config):
    return DPOTrainer(
        str(folder / "model"),
        args=DPOConfig(**{"output_dir": str(folder / "out"), **COMMON, **config}),
        train_dataset=rows or ROWS["pairs"],
        eval_dataset=eval_dataset,
        processing_class=made_tokenizer(TEMPLATE, bos=False),
        callbacks=callbacks,
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class AtStep(TrainerCallback):
    """Does something at the end of the second step."""

    def __init__(self, work):
        self.work = work

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.work()


def test_a_script_stops_where_the_loss_is_no_number(folder):
    trainer = dpo(folder, save_strategy="steps", save_steps=3, logging_steps=10)

    def spoil():
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(float("nan"))

    trainer.add_callback(AtStep(spoil))
    with pytest.raises(UserError, match=r"step 3: loss is nan.*start again: there is no whole checkpoint"):
        trainer.train()
    assert not list((folder / "out").glob("checkpoint-*"))
    rows = [json.loads(line) for line in (folder / "out" / "nan_batch.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert "Why?" in "".join(row["text"] for row in rows)
    assert json.loads((folder / "out" / "run.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_script_with_a_checkpoint_from_which_it_goes_on(number, folder):
    before = signal.getsignal(number)
    trainer = dpo(folder, callbacks=[AtStep(lambda: os.kill(os.getpid(), number))])
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert is_whole(folder / "out" / "checkpoint-2")
    assert json.loads((folder / "out" / "run.json").read_text())["state"] == "stopped"
    resumed, whole = dpo(folder), dpo(folder, output_dir=str(folder / "whole"))
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)


def test_a_second_interrupt_in_a_notebook_is_told_without_the_frames_of_a_step(folder, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer = dpo(folder, callbacks=[AtStep(twice)])
    with pytest.raises(KeyboardInterrupt, match="ended at once, without saving") as ended:
        trainer.train()
    assert len(ended.traceback) < 10  # and not the thirty of transformers and torch
    assert ended.value.__suppress_context__
    assert "eval_num_tokens" in trainer.evaluate(ROWS["pairs"])
    assert "eval_num_tokens" not in dpo(folder).evaluate(ROWS["pairs"])


class AtEvaluation(TrainerCallback):
    """Acts between the batches of evaluations."""

    def __init__(self, trainer, action):
        self.trainer, self.action, self.batches = trainer, action, 0

    def on_train_begin(self, args, state, control, **kwargs):
        between = self.trainer.between_batches

        def counted():
            self.batches += 1
            if self.batches == 2:
                self.action()
            between()

        self.trainer.between_batches = counted


@pytest.mark.parametrize(
    "best",
    [
        {},
        {"metric_for_best_model": "loss"},
        {"metric_for_best_model": "loss", "save_strategy": "best"},
        {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2},
    ],
)
def test_a_signal_during_an_evaluation_leaves_it_and_saves(best, folder, monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1, "save_strategy": "no"}
    evaluated |= best
    trainer = dpo(folder, eval_dataset=ROWS["pairs"], **evaluated)
    watch = AtEvaluation(trainer, lambda: signal.raise_signal(signal.SIGINT))
    trainer.add_callback(watch)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 2, which is saved"):
        trainer.train()
    assert watch.batches == 2
    assert is_whole(folder / "out" / "checkpoint-2")
    assert not [row for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.state.best_metric in (None, math.inf)  # with which anything is better
    assert trainer.args.save_strategy == evaluated["save_strategy"]
    assert "eval_loss" in trainer.evaluate()
    resumed = dpo(folder, eval_dataset=ROWS["pairs"], **evaluated)
    resumed.train(resume_from_checkpoint=True)
    evaluations = {row["step"]: row["eval_loss"] for row in resumed.state.log_history if "eval_loss" in row}
    assert list(evaluations) == [4, 6]
    assert resumed.state.best_metric == (min(evaluations.values()) if best else None)


def test_in_a_thread_a_script_trains_without_handling_signals(folder):
    trainer = dpo(folder, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert len(losses(trainer)) == 1


def test_a_checkpoint_that_was_cut_off_is_passed_over(folder):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    dpo(folder, **saving, save_total_limit=3).train()
    assert sorted(path.name for path in (folder / "out").glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 3, 4)]
    (folder / "out" / "checkpoint-4" / "model.safetensors").write_bytes(b"cut off")
    resumed = dpo(folder, **{**saving, "max_steps": 5})
    resumed.train(resume_from_checkpoint=True)
    assert [row["step"] for row in resumed.state.log_history if "loss" in row] == [1, 2, 3, 4, 5]
    assert "step 4" not in (folder / "out" / "health.jsonl").read_text()
    (folder / "out" / "checkpoint-5" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"checkpoint-5 is damaged: model\.safetensors is missing or has another size"):
        dpo(folder).train(resume_from_checkpoint=str(folder / "out" / "checkpoint-5"))


def test_a_checkpoint_of_an_earlier_version_resumes_with_a_warning(folder, caplog):
    saving = {"save_strategy": "steps", "save_steps": 2}
    dpo(folder, **saving, max_steps=2).train()
    (folder / "out" / "checkpoint-2" / "whole.json").unlink()
    dpo(folder, max_steps=3).train(resume_from_checkpoint=True)
    assert "checkpoint-2 has no whole.json" in caplog.text
    with pytest.raises(UserError, match=r"has no whole checkpoint\. Leave it out to begin anew"):
        dpo(folder, output_dir=str(folder / "empty")).train(resume_from_checkpoint=True)
    with pytest.raises(UserError, match=r"no folder .*checkpoint-9\. Checkpoints beside it: .*checkpoint-2\.$"):
        dpo(folder).train(resume_from_checkpoint=str(folder / "out" / "checkpoint-9"))


def test_a_script_without_a_checkpoint_is_told_those_of_the_run_before_it(folder):
    dpo(folder, save_strategy="steps", save_steps=1, max_steps=1).train()
    dpo(folder, max_steps=1).train()
    aside = folder / "out" / "superseded-1" / "checkpoint-1"
    with pytest.raises(UserError, match=rf"begin anew, or name one of an earlier run: {aside}\.$"):
        dpo(folder).train(resume_from_checkpoint=True)
    resumed = dpo(folder, max_steps=2)
    resumed.train(resume_from_checkpoint=str(aside))
    assert resumed.state.global_step == 2


def test_the_metric_of_the_best_checkpoint_is_that_of_one_of_several_sets(folder):
    sets = {"a": ROWS["pairs"][:2], "b": ROWS["pairs"][2:]}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "max_steps": 1}
    with pytest.raises(UserError, match=r"^metric_for_best_model: .* have 'a_loss' or 'b_loss', not 'loss'\."):
        dpo(folder, eval_dataset=sets, **best)
    trainer = dpo(folder, eval_dataset=sets, **best, metric_for_best_model="eval_a_loss")
    trainer.train()
    assert trainer.state.best_metric == trainer.evaluate()["eval_a_loss"]


def test_a_trainer_evaluates_after_a_training_that_failed(folder):
    trainer = dpo(folder, eval_dataset=ROWS["pairs"], eval_strategy="steps", metric_for_best_model="nothing")
    with pytest.raises(UserError, match="evaluations have no 'nothing'"):
        trainer.train()
    assert "eval_loss" in trainer.evaluate()


def test_a_script_that_resumes_with_other_rows_is_told_its_argument(folder):
    dpo(folder, save_strategy="steps", save_steps=1, max_steps=1).train()
    other = ROWS["pairs"][:-1]
    with pytest.raises(
        UserError, match=r"in a script allow_changed_data=True\), or begin a new run in another output_"
    ):
        dpo(folder, rows=other, max_steps=2).train(resume_from_checkpoint=True)
    dpo(folder, rows=other, max_steps=2, allow_changed_data=True).train(resume_from_checkpoint=True)


def test_prepared_rows_are_kept_by_their_content(folder, monkeypatch):
    kept = folder / "prepared"
    first = dpo(folder, dataset_prepared_path=str(kept))
    (made,) = kept.iterdir()
    built = made.stat().st_mtime_ns
    again = dpo(folder, dataset_prepared_path=str(kept), learning_rate=1e-3, max_steps=1)
    assert [path.stat().st_mtime_ns for path in kept.iterdir()] == [built]
    assert again.train_dataset[:] == first.train_dataset[:]
    other = [{**row, "chosen": row["chosen"] + "!"} for row in ROWS["pairs"]]
    dpo(folder, rows=other, dataset_prepared_path=str(kept))
    dpo(folder, dataset_prepared_path=str(kept), max_length=16)
    assert len(list(kept.iterdir())) == 3
    again.evaluate(ROWS["pairs"])
    assert len(list(kept.iterdir())) == 3


def test_where_nothing_can_be_kept_rows_are_prepared_all_the_same(folder, caplog):
    (folder / "file").touch()
    trainer = dpo(folder, dataset_prepared_path=str(folder / "file" / "kept"), precompute_ref_log_probs=True)
    assert "dataset_prepared_path: " in caplog.text
    assert len(trainer.train_dataset) == len(ROWS["pairs"])


def test_layout_and_offloading_are_arguments(folder):
    whole = dpo(folder)
    whole.train()
    spared = dpo(folder, layout="padded", activation_offloading=True, reference_offloading=True)
    spared.train()
    assert (whole.runner.engine.layout, spared.runner.engine.layout) == ("tree", "padded")
    assert losses(spared) == pytest.approx(losses(whole), abs=1e-5)


def test_a_loss_that_stays_too_high_ends_a_script(folder):
    with pytest.raises(UserError, match="loss_watchdog_threshold"):
        dpo(folder, loss_watchdog_threshold=0.01, loss_watchdog_patience=2).train()


def test_health_is_watched(folder):
    dpo(folder, learning_rate=1.0, num_train_epochs=20).train()
    assert (folder / "out" / "health.jsonl").is_file()


def test_the_rules_of_configs_hold_for_arguments_under_their_names(folder):
    with pytest.raises(UserError, match=r"^fp16: cannot be used with 'bf16=True'"):
        DPOConfig(output_dir=str(folder), fp16=True, bf16=True)
    with pytest.raises(UserError, match="gradient_checkpointing_kwargs: only 'use_reentrant'"):
        SFTConfig(output_dir=str(folder), gradient_checkpointing_kwargs={"offload": True})
    args = GRPOConfig(output_dir=str(folder), reward_weights=[1.0, 2.0])
    with pytest.raises(UserError, match=r"^reward_weights: 2 weights for 1 reward[. ]"):
        GRPOTrainer(str(folder / "model"), len, args, [{"prompt": said("user", "Why?")}])


def test_deepspeed_is_an_argument(folder, monkeypatch):
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(UserError, match="deepspeed: is not installed"):
            DPOConfig(output_dir=str(folder), deepspeed="zero2.json")
        return
    monkeypatch.setattr(os, "environ", {**os.environ})
    trainer = SFTTrainer(
        str(folder / "model"),
        SFTConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False, deepspeed="zero2.json", **COMMON),
        train_dataset=ROWS["text"],
    )
    trainer.train()
    assert trainer.is_deepspeed_enabled
    assert losses(trainer)[-1] < losses(trainer)[0]
