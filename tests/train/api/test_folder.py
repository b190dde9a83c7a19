"""What the run of a script leaves: the folder that `upweight report` and `doctor` read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from made_runs import HOLDER
from parity_script import ROWS, TEMPLATE, made_tokenizer, said, write_model
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from upweight.doctor.run import check_run
from upweight.errors import UserError
from upweight.runs.report.run import RunReader

COMMON = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4}
PROMPTS = [{"prompt": said("user", f"{number} + 1?")} for number in range(6)]


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE), "")
    return tmp_path


def dpo(folder, **config):
    return DPOTrainer(
        str(folder / "model"),
        args=DPOConfig(output_dir=str(folder / "out"), beta=0.3, **COMMON, **config),
        train_dataset=ROWS["pairs"],
        eval_dataset=ROWS["pairs"][:2],
        processing_class=made_tokenizer(TEMPLATE),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )


def read(folder):
    return RunReader(folder / "out").read("out")


def test_a_preference_script_leaves_what_the_report_shows(folder):
    dpo(folder, max_steps=3, save_strategy="no").train()
    run = read(folder)
    assert (run["method"], run["state"], run["step"], run["max_steps"]) == ("DPO", "done", 3, 3)
    assert {"loss", "rewards/margins"} <= run["metrics"].keys()
    facts = dict(run["facts"])
    assert facts["Model"] == str(folder / "model")
    assert (facts["Trained"], facts["Rows"], facts["Held-out rows"]) == ("lora adapter, rank 4", "8", "2")
    assert run["settings"]["rl_beta"] == "0.3"
    assert (folder / "out" / "report.html").is_file()
    assert check_run(folder / "out")[0].says == "finished at step 3 of 3"


def test_an_online_script_leaves_rewards_and_completions(folder):
    def short(completions, **kwargs):
        return [1.0 / (1 + len(answer[0]["content"])) for answer in completions]

    config = {"num_generations": 4, "max_completion_length": 5, "log_completions": True, "num_train_epochs": 1}
    GRPOTrainer(
        str(folder / "model"),
        short,
        args=GRPOConfig(output_dir=str(folder / "out"), save_strategy="no", **COMMON, **config),
        train_dataset=PROMPTS,
        processing_class=made_tokenizer(TEMPLATE),
    ).train()
    run = read(folder)
    assert (run["method"], run["online"], run["state"]) == ("GRPO", True, "done")
    assert run["step"] == run["max_steps"] == 6
    assert {"reward", "rewards/short/mean"} <= run["metrics"].keys()
    assert run["completions"]
    assert dict(run["facts"])["Rewards"] == "short"


def test_a_resumed_training_goes_on_in_the_folder_and_another_begins_anew(folder):
    dpo(folder, max_steps=4, save_strategy="steps", save_steps=2).train()
    dpo(folder, max_steps=3, save_strategy="no").train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    assert read(folder)["steps"] == [1, 2, 3]
    trainer = dpo(folder, max_steps=1, save_strategy="no")
    for _ in range(2):
        trainer.train()
        assert read(folder)["steps"] == [1]
    trainer.evaluate()
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]


def test_a_resume_goes_on_with_the_run_that_was_stopped_and_not_with_a_longer_one_before_it(folder, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1}
    dpo(folder, max_steps=3, **saving).train()
    dpo(folder, max_steps=1, **saving).train()
    assert "3 checkpoints after step 0 are now in" in caplog.text
    resumed = dpo(folder, max_steps=2, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert read(folder)["steps"] == [1, 2]
    assert sorted(path.name for path in (folder / "out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert "this run is finished" not in caplog.text
    again = resumed.train(resume_from_checkpoint=True)
    assert "this run is finished (step 2 of 2), and nothing was left to train" in caplog.text
    losses = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert again.training_loss == again.metrics["train_loss"] == pytest.approx(sum(losses) / 2)
    resumed.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-1"))  # and sets the second aside
    assert [path.name for path in (folder / "out" / "superseded-2").iterdir()] == ["checkpoint-2"]


def test_arguments_that_are_changed_after_the_trainer_was_made_are_warned_of(folder, caplog):
    trainer = dpo(folder, max_steps=1, save_strategy="no")
    trainer.train()
    assert "changed after the trainer was made" not in caplog.text
    args = DPOConfig(output_dir=str(folder / "out"), max_steps=1, save_strategy="no", **COMMON)
    tokenizer = made_tokenizer(TEMPLATE)
    trainer = DPOTrainer(str(folder / "model"), args=args, train_dataset=ROWS["pairs"], processing_class=tokenizer)
    args.learning_rate, args.max_steps = 1e-3, 2
    trainer.train()
    assert "args: max_steps, learning_rate changed after the trainer was made" in caplog.text
    trainer.args.beta, trainer.loss_type, trainer.args.logging_steps = 3.0, "ipo", 2  # the last takes effect
    caplog.clear()
    trainer.train()
    assert "args: max_steps, learning_rate, beta, loss_type changed after the trainer was made" in caplog.text


def test_rows_that_take_the_place_of_the_trainers_are_prepared_or_refused(folder):
    trainer = dpo(folder, max_steps=1, save_strategy="no")
    rows = trainer.eval_dataset = Dataset.from_list(ROWS["pairs"])
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate(rows)["eval_loss"]
    trainer.eval_dataset = {"few": ROWS["pairs"][:1]}
    assert "eval_few_loss" in trainer.evaluate()
    trainer.train_dataset = trainer.train_dataset.select(range(2))  # prepared rows
    trainer.train()
    trainer.train_dataset = rows
    with pytest.raises(UserError, match="train_dataset: was replaced after the trainer was made"):
        trainer.train()


def test_a_training_that_fails_says_so(folder):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ValueError("broken callback")

    trainer = dpo(folder, save_strategy="no")
    trainer.add_callback(Fails())
    with pytest.raises(ValueError, match="broken callback") as raised:
        trainer.train()
    frames = [(entry.path.name, entry.name) for entry in raised.traceback]  # and none of transformers
    assert frames == [
        (Path(__file__).name, "test_a_training_that_fails_says_so"),
        ("trainer.py", "train"),
        (Path(__file__).name, "on_step_end"),
    ]
    assert (read(folder)["state"], read(folder)["message"]) == ("failed", "ValueError: broken callback")


def test_a_script_does_not_train_into_the_folder_of_a_process_that_does(folder):
    other = subprocess.Popen([sys.executable, "-c", HOLDER, folder / "out"], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"output_dir: process {other.pid} is training into"):
            dpo(folder).train()
        assert not (folder / "out" / "run.json").exists()
    finally:
        other.kill()
        other.wait()
