"""Whole runs from a config: what they write, how they end, and that a resumed one equals one never stopped."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from made_runs import largest_difference, metrics_of, on_ranks, started, write_config
from slow_cases import slow_except
from upweight.config import load_config
from upweight.errors import UserError
from upweight.models.memory import HEAD_CHUNK
from upweight.runs.checkpoints import checkpoints_of, is_whole
from upweight.runs.files import RECORD, read_json
from upweight.train.policy import freeze_all_but
from upweight.train.recording.run_folder import changed_keys
from upweight.train.run import build, evaluate, train

LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4, "lora_dropout": 0.1}
KINDS = {
    "full": {},
    "masters": {"bf16": True},
    "adapter": {**LORA, "bf16": True},
    "dropout": {"model_config": {"attention_dropout": 0.2}, "disable_dropout": False},
    "synced reference": {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.3},
    "evaluated": {"val_set_size": 4, "eval_steps": 3, "early_stopping_patience": 30, "eval_on_start": True},
}


def run(file, resume=False):
    train(load_config(file), resume=resume)


def run_in_child(file, resume=False):
    process = started(run, file, resume)
    process.join(120)
    return process.exitcode


def weights_file(folder):
    (file,) = (folder / "out").glob("*model.safetensors")
    return file


def weights(folder):
    return load_file(weights_file(folder))


@pytest.fixture(scope="module")
def runs(model_folder, tmp_path_factory):
    """Uninterrupted runs by kind, each made once."""
    made = {}

    def uninterrupted(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp("whole")
            run(write_config(folder, model_folder, save_steps=4, **KINDS[kind]))
            made[kind] = folder
        return made[kind]

    return uninterrupted


def test_a_run_folder_holds_what_it_promises(runs):
    out = runs("full") / "out"
    assert {path.name for path in out.iterdir()} >= {"config.yaml", "metrics.jsonl", "model.safetensors", "config.json",
                                                     "tokenizer.json", "checkpoint-4", "checkpoint-8"}  # fmt: skip
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert {"loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "grad_norm", "learning_rate"} <= lines[
        0
    ].keys()
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["loss"] < 0.6
    again = load_config(out / "config.yaml")
    first = load_config(runs("full") / "config.yaml")
    assert (again.optim, again.run, again.method) == (first.optim, first.run, first.method)


@pytest.mark.parametrize(
    ("lost", "kind"),
    slow_except(
        [("after 4", "full"), ("after 8", "adapter"), ("after 8", "dropout")],
        itertools.product(["after 4", "after 8"], KINDS),
    ),
)
def test_resuming_continues_exactly(kind, lost, runs, tmp_path):
    """Step 4 lies within the first epoch of six steps, step 8 within the second, which is shuffled otherwise."""
    right, out = runs(kind), tmp_path / "out"
    shutil.copytree(right / "out", out)
    for step, folder in checkpoints_of(out):
        if step > int(lost.split()[1]):
            (folder / "whole.json").unlink()
    whole = out / "metrics.jsonl"
    whole.write_text(whole.read_text() + '{"step": 12, "lo')
    (out / weights_file(right).name).unlink()
    train(load_config(right / "config.yaml", [f"output_dir={out}"]), resume=True)
    assert metrics_of(out) == metrics_of(right / "out")
    assert largest_difference(weights(tmp_path), weights(right)) == 0
    assert (out / "superseded-1").is_dir()
    at = (read_json(folder / RECORD)["resumed_step"] for folder in (right / "out", out))
    assert tuple(at) == (0, int(lost.split()[1]))


@pytest.mark.slow
def test_resuming_on_two_ranks_continues_exactly(model_folder, tmp_path):
    file, out = write_config(tmp_path, model_folder, micro_batch_size=1, save_steps=4, **LORA), tmp_path / "out"
    on_ranks(run, 2, file)
    right = metrics_of(out)
    (out / "checkpoint-12" / "whole.json").unlink()
    on_ranks(run, 2, file, True)
    assert metrics_of(out) == right
    assert [line["step"] for line in right] == list(range(1, 13))


def test_what_changed_since_a_run_began_is_named_when_it_is_resumed(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=1)
    run(file)
    changed = load_config(file, ["rl_beta=0.3", "learning_rate=0.1", "logging_steps=3"])
    assert changed_keys(changed, tmp_path / "out").keys() == {"learning_rate", "rl_beta"}
    assert changed_keys(load_config(file), tmp_path / "out") == {}


def test_a_run_is_not_resumed_on_other_data_unless_that_is_allowed(model_folder, tmp_path, caplog):
    file = write_config(tmp_path, model_folder, max_steps=4, save_steps=2)
    run(file)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    rows = (tmp_path / "pairs.jsonl").read_text().splitlines()
    first = json.loads(rows[0])
    swapped = {**first, "chosen": first["rejected"], "rejected": first["chosen"]}
    (tmp_path / "pairs.jsonl").write_text("\n".join([json.dumps(swapped), *rows[1:]]))
    with pytest.raises(UserError, match=r"not what .*checkpoint-2 was trained on.*--allow-changed-data"):
        run(file, resume=True)
    assert len(metrics_of(tmp_path / "out")) == 4  # nothing is lost by the refusal
    train(load_config(file, ["allow_changed_data=true"]), resume=True)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    (tmp_path / "out" / "checkpoint-2" / "data.json").unlink()  # as an earlier version wrote it
    sizes = json.loads((tmp_path / "out" / "checkpoint-2" / "whole.json").read_text())
    del sizes["data.json"]
    (tmp_path / "out" / "checkpoint-2" / "whole.json").write_text(json.dumps(sizes))
    run(file, resume=True)
    assert "checkpoint-2 holds no hash of its data" in caplog.text


def test_a_finished_run_that_is_resumed_trains_no_step_more(model_folder, tmp_path, caplog):
    file, out = write_config(tmp_path, model_folder, max_steps=3), tmp_path / "out"
    run(file)
    right, trained = metrics_of(out), weights(tmp_path)
    with caplog.at_level("INFO", logger="upweight"):
        run(file, resume=True)
    assert "this run is finished (step 3 of 3); raise max_steps or num_epochs to go on" in caplog.text
    assert metrics_of(out) == right
    assert largest_difference(weights(tmp_path), trained) == 0


def test_a_resumed_run_takes_its_new_learning_rate(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=4, save_steps=2, lr_scheduler="linear", warmup_steps=0)
    run(file)
    before = [line["learning_rate"] for line in metrics_of(tmp_path / "out")]
    halved = [f"learning_rate={before[0] / 2}", f"resume_from_checkpoint={tmp_path}/out/checkpoint-2"]
    train(load_config(file, halved))
    rates = [line["learning_rate"] for line in metrics_of(tmp_path / "out")]
    assert rates == pytest.approx([*before[:2], before[2] / 2, before[3] / 2])


@pytest.mark.parametrize("key", ["optimizer=sgd", "adapter=lora", "tokens=[new]"])
def test_a_run_is_not_resumed_with_what_its_checkpoints_cannot_hold(key, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=1)
    run(file)
    other = load_config(file, [key, *(["lora_target_linear=true"] if "lora" in key else [])])
    with pytest.raises(UserError, match=f"resume: {key.split('=')[0]}.*changed since"):
        train(other, resume=True)
    assert changed_keys(load_config(file), tmp_path / "out") == {}


def test_what_a_checkpoint_of_another_folder_holds_is_said_by_the_run_that_wrote_it(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=1)
    run(file)
    elsewhere = [f"output_dir={tmp_path}/other", f"resume_from_checkpoint={tmp_path}/out/checkpoint-1"]
    with pytest.raises(UserError, match=r"resume: optimizer .* changed since"):
        train(load_config(file, [*elsewhere, "optimizer=sgd"]))
    assert not (tmp_path / "other" / "config.yaml").exists()


def test_a_rate_that_a_schedule_has_reduced_is_not_set_anew(model_folder, tmp_path):
    keys = {"lr_scheduler": "reduce_lr_on_plateau", "val_set_size": 0.5, "eval_steps": 1}
    file = write_config(tmp_path, model_folder, max_steps=1, **keys)
    run(file)
    with pytest.raises(UserError, match=r"resume: learning_rate .* changed since.*reduce_lr_on_plateau"):
        train(load_config(file, ["learning_rate=0.1"]), resume=True)


KILLS_LOADER = """
import sys
from pathlib import Path
import psutil
from transformers import TrainerCallback
from upweight.config import load_config
from upweight.train.run import train

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **known):
        if state.global_step == 3:
            for child in psutil.Process().children():
                child.kill()

train(load_config(Path(sys.argv[1])), watchers=[Kill()])
"""


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_named_with_what_is_safe(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, dataloader_num_workers=1, num_epochs=400, save_steps=2)
    command = [sys.executable, "-c", KILLS_LOADER, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert "UserError: dataloader_num_workers: a process that reads rows was lost" in done.stderr
    assert "Once the cause is fixed, go on from step " in done.stderr
    train(load_config(file, ["max_steps=5"]), resume=True)


@pytest.mark.slow
def test_a_folder_that_another_run_writes_to_is_refused_before_anything_is_loaded(model_folder, tmp_path):
    file, out = write_config(tmp_path, model_folder, max_steps=400, num_epochs=None), tmp_path / "out"
    process = started(run, file)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.005)
    with pytest.raises(UserError, match=f"process {process.pid} is training into"):
        train(load_config(file, [f"base_model={tmp_path}/none"]))  # said before a model is looked for
    process.kill()
    process.join()
    train(load_config(file, ["max_steps=1"]))


def test_a_damaged_checkpoint_is_passed_over(runs, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, save_steps=4)
    run(file)
    out = tmp_path / "out"
    with (out / "checkpoint-12" / "optimizer.pt").open("r+b") as damaged:
        damaged.truncate(100)
    assert run_in_child(file, resume=True) == 0
    assert metrics_of(out) == metrics_of(runs("full") / "out")
    assert is_whole(out / "checkpoint-12")
    assert not is_whole(out / "superseded-1" / "checkpoint-12")


def test_a_named_checkpoint_is_continued_from(runs, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, save_steps=4)
    run(file)
    train(load_config(file, [f"resume_from_checkpoint={tmp_path}/out/checkpoint-4"]))
    assert metrics_of(tmp_path / "out") == metrics_of(runs("full") / "out")


def test_checkpoints_beyond_the_limit_are_dropped(model_folder, tmp_path):
    run(write_config(tmp_path, model_folder, save_steps=2, save_total_limit=2))
    assert [step for step, _ in checkpoints_of(tmp_path / "out")] == [12, 10]


def killed_at(file, out, seconds):
    """Start a run, kill it so many seconds after its first line of metrics, and say whether it was still running."""
    process = started(run, file, True)
    while process.is_alive() and not (out / "metrics.jsonl").exists():
        time.sleep(0.005)
    time.sleep(seconds)
    alive = process.is_alive()
    process.kill()
    process.join()
    return alive


def kill_and_resume(moments, runs, model_folder, tmp_path):
    draw = random.Random(4)
    right, killed = metrics_of(runs("full") / "out"), 0
    for number in range(moments):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = write_config(folder, model_folder, save_steps=4)
        while not killed_at(file, folder / "out", 1.2 * draw.random()):
            (folder / "out").rename(folder / f"done-{draw.random()}")
        killed += 1
        assert run_in_child(file, resume=True) == 0
        assert metrics_of(folder / "out") == right, number
        assert largest_difference(weights(folder), weights(runs("full"))) == 0
    assert killed == moments


@pytest.mark.slow
def test_killed_at_a_few_moments_it_continues_exactly(runs, model_folder, tmp_path):
    kill_and_resume(3, runs, model_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.sweep
def test_killed_at_twenty_moments_it_continues_exactly(runs, model_folder, tmp_path):
    kill_and_resume(20, runs, model_folder, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_its_code(number, runs, model_folder, tmp_path):
    file, out = write_config(tmp_path, model_folder, save_strategy="no"), tmp_path / "out"
    process = started(run, file)
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.005)
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    ((step, folder),) = checkpoints_of(out)
    assert is_whole(folder)
    assert step < 12
    assert [line["step"] for line in metrics_of(out)] == list(range(1, step + 1))
    run(file, resume=True)
    assert metrics_of(out) == metrics_of(runs("full") / "out")


def test_a_loss_that_is_no_number_stops_before_it_is_saved_and_leaves_its_rows(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, learning_rate=1e30, max_grad_norm=0, warmup_steps=2, optimizer="sgd",
                        lr_scheduler="constant_with_warmup", logging_steps=5, save_steps=2)  # fmt: skip
    with pytest.raises(UserError, match=r"step \d+: (loss|grad_norm) is nan.*nan_batch.jsonl"):
        run(file)
    out = tmp_path / "out"
    rows = [json.loads(line) for line in (out / "nan_batch.jsonl").read_text().splitlines()]
    first, last = rows[0]["step"], rows[-1]["step"]
    logged = metrics_of(out)
    assert last == logged[-1]["step"]
    assert first == (logged[-2]["step"] if len(logged) > 1 else 0) + 1
    assert {"step", "row", "text", "ids", "loss_mask"} == rows[0].keys()
    assert "<|im_start|>user" in rows[0]["text"]
    for _, folder in checkpoints_of(out):
        saved = load_file(folder / "model.safetensors")
        assert all(bool(torch.isfinite(value).all()) for value in saved.values())


def test_a_loss_above_the_limit_stops_the_run(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, loss_watchdog_threshold=0.1, loss_watchdog_patience=2)
    with pytest.raises(UserError, match="step 2: the loss was above loss_watchdog_threshold"):
        run(file)
    assert [row["loss_watchdog/logs_above"] for row in metrics_of(tmp_path / "out")] == [1, 2]


def test_the_first_step_is_saved_and_profiled_when_asked(model_folder, tmp_path):
    run(write_config(tmp_path, model_folder, save_first_step=True, save_strategy="no", max_steps=3, profiler_steps=1,
                     profiler_steps_start=1))  # fmt: skip
    assert [step for step, _ in checkpoints_of(tmp_path / "out")] == [1]
    assert "traceEvents" in json.loads((tmp_path / "out" / "profile.json").read_text())


def test_the_best_checkpoint_becomes_the_result(model_folder, tmp_path):
    """A rate that breaks the model late makes an early checkpoint the best."""
    file = write_config(tmp_path, model_folder, val_set_size=4, eval_steps=2, save_steps=2, load_best_model_at_end=True,
                        lr_scheduler="constant", warmup_steps=0, learning_rate=0.3, max_grad_norm=0, optimizer="sgd",
                        bf16=True, save_total_limit=1)  # fmt: skip
    run(file)
    out = tmp_path / "out"
    scored = {line["step"]: line["eval_loss"] for line in metrics_of(out) if "eval_loss" in line}
    best = min(scored, key=scored.__getitem__)
    saved = {step for step, _ in checkpoints_of(out)}
    assert best in saved
    result, kept = load_file(out / "model.safetensors"), load_file(out / f"checkpoint-{best}" / "model.safetensors")
    assert {value.dtype for value in result.values()} == {torch.bfloat16}
    assert {value.dtype for value in kept.values()} == {torch.float32}
    assert all(torch.equal(result[name], kept[name].bfloat16()) for name in kept)


def test_early_stopping_stops(model_folder, tmp_path):
    file = write_config(
        tmp_path,
        model_folder,
        val_set_size=4,
        eval_steps=1,
        early_stopping_patience=2,
        metric_for_best_model="rewards/chosen",
        greater_is_better=False,
        learning_rate=0.01,
    )
    run(file)
    assert metrics_of(tmp_path / "out")[-1]["step"] < 12


def test_evaluate_gives_the_metrics_of_the_held_out_rows(model_folder, tmp_path):
    metrics = evaluate(load_config(write_config(tmp_path, model_folder, val_set_size=6)))
    assert "epoch" not in metrics  # nothing was trained
    assert metrics["eval_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert "eval_rewards/accuracies" in metrics
    with pytest.raises(UserError, match="nothing to evaluate on"):
        evaluate(load_config(write_config(tmp_path, model_folder)))


@pytest.mark.parametrize(("optimizer", "each"), [("adamw_torch", 12), ("sgd", 4)])
def test_activations_are_kept_beside_what_the_optimizer_of_the_config_takes(optimizer, each, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, optimizer=optimizer, gradient_checkpointing=True)
    model = build(load_config(file)).model
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert model.__dict__["_activation_budget"].reserved == each * trained + HEAD_CHUNK


@pytest.mark.parametrize("entry", [False, True])
def test_the_saved_tokenizer_writes_prompts_as_training_did(entry, model_folder, tmp_path):
    rows = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "the quick brown fox?"}, {"role": "assistant", "content": "over the dog"}]
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 4)
    named = {"chat_template": "gemma"}
    dataset = {"path": str(rows), "type": "chat_template", **(named if entry else {})}
    file = write_config(tmp_path, model_folder, rl=None, max_steps=1, datasets=[dataset], **({} if entry else named))
    trainer = build(load_config(file))
    trainer.save_model()
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = again.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert "<start_of_turn>model" in prompt
    row = trainer.train_dataset[0]
    assert row["input_ids"][: row["loss_mask"].index(True)] == again(prompt, add_special_tokens=False)["input_ids"]


def test_noise_on_embeddings_changes_training_and_not_evaluation(model_folder, tmp_path):
    made = []
    for keys in ({}, {"neftune_noise_alpha": 20.0}, {"activation_offloading": True, "gradient_checkpointing": True}):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        rows = folder / "texts.jsonl"
        rows.write_text("".join(json.dumps({"text": f"the quick brown fox {n}"}) + "\n" for n in range(8)))
        run(write_config(folder, model_folder, rl=None, max_steps=1, val_set_size=4, eval_on_start=True, **keys,
                         datasets=[{"path": str(rows), "type": "completion", "field": "text"}]))  # fmt: skip
        made.append(metrics_of(folder / "out"))
    plain, noisy, offloaded = made
    start, trained = (next(n for n, line in enumerate(plain) if key in line) for key in ("eval_loss", "loss"))
    assert noisy[start]["eval_loss"] == plain[start]["eval_loss"]
    assert noisy[trained]["loss"] != pytest.approx(plain[trained]["loss"], rel=1e-3)
    assert [line.get("loss") for line in offloaded] == [line.get("loss") for line in plain]


def test_only_named_parameters_are_trained(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, unfrozen_parameters=[r"model.layers.1\.", "lm_head"], max_steps=2)
    run(file)
    before, after = load_file(model_folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(("model.layers.1.", "lm_head")) for name in changed)
    with pytest.raises(UserError, match="'nothing' matches no weight"):
        freeze_all_but(torch.nn.Linear(2, 2), ["nothing"])
    layers = torch.nn.ModuleDict(
        {"embed_tokens": torch.nn.Embedding(2, 2), "layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])}
    )
    with pytest.raises(UserError, match=r"names look like layers\.0\.weight"):
        freeze_all_but(layers, ["layers.2[0-9].weight"])


def test_a_separate_reference_under_an_adapter_trains_as_the_adapter_switched_off(model_folder, tmp_path):
    folders = []
    for separate in (False, True):
        folder = tmp_path / str(separate)
        folder.mkdir()
        run(write_config(folder, model_folder, max_steps=3, rl_adapter_ref_model=separate, **LORA))
        folders.append(folder)
    assert metrics_of(folders[0] / "out") == metrics_of(folders[1] / "out")


def test_rows_that_were_dropped_are_told_of(model_folder, tmp_path, caplog):
    build(load_config(write_config(tmp_path, model_folder, sequence_len=30)))
    said = [record.getMessage() for record in caplog.records if "rows read" in record.getMessage()]
    assert len(said) == 1
    assert "dropped: longer than sequence_len" in said[0]
