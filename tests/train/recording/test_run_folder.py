"""Metrics and config as files."""

import json
from contextlib import nullcontext

import pytest
from transformers import TrainerControl, TrainerState

from upweight.config import load_config, parse_config
from upweight.config.config import SECTIONS
from upweight.errors import UserError
from upweight.runs.files import METRICS
from upweight.train.recording.metrics import MetricsFile, cut_metrics
from upweight.train.recording.run_folder import (
    changed_keys,
    named_verdicts,
    require_same_resume_keys,
    require_steps_left,
    write_config,
)

PAIRS = {"base_model": "tiny", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}
LORA = {"adapter": "lora", "lora_target_modules": ["q_proj"], "peft": {"loftq_config": {"loftq_bits": 4}}}
GRPO = {"base_model": "tiny", "rl": "grpo", "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "trl": {"reward_funcs": ["rewards.one"], "beta": 0.1, "num_generations": 4, "use_vllm": True},
        "vllm": {"port": 8123}}  # fmt: skip
CONFIGS = {
    "dpo": {**PAIRS, "rl": "dpo", "rl_beta": 0.3, "batch_size": 8, "micro_batch_size": 2, "val_set_size": 5},
    "losses": {**PAIRS, "rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5], **LORA},
    "cosine": {**PAIRS, "rl": "kto", "cosine_min_lr_ratio": 0.1, "warmup_ratio": 0.1, "wandb_project": "p"},
    "groups": {**PAIRS, "reward_model": True, "lr_groups": [{"name": "a", "modules": ["b"], "lr": 0.1}]},
    "fsdp": {**PAIRS, "rl": "orpo", "fsdp": True, "fsdp_config": {"offload_params": True}},
    "grpo": GRPO,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_written_config_is_the_run_again(name, tmp_path):
    config = parse_config(CONFIGS[name], folder=tmp_path)
    write_config(config, tmp_path)
    again = load_config(tmp_path / "config.yaml")
    for section in (*SECTIONS, "method"):
        right = getattr(config, section).model_dump()
        right.pop("batch_size", None)
        assert {k: v for k, v in getattr(again, section).model_dump().items() if k in right} == right
    assert changed_keys(again, tmp_path) == changed_keys(config, tmp_path) == {}
    assert not [notice for notice in again.notices if "no effect" in notice]


@pytest.mark.parametrize("content", [b"", b"a: [", b"- x", b"\xff\xfe", b"rl: \0"])
def test_a_written_config_that_is_damaged_is_warned_of(content, tmp_path, caplog):
    config = parse_config(CONFIGS["grpo"], folder=tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    assert changed_keys(config, tmp_path) == {}
    assert f"{tmp_path / 'config.yaml'} cannot be read" in caplog.text


def written(folder, *logs):
    file, state = MetricsFile(folder), TrainerState(is_world_process_zero=True)
    for step, log in enumerate(logs, 1):
        state.global_step = step
        file.on_log(None, state, TrainerControl(), logs=log)
    return (folder / METRICS).read_text()


def test_the_written_config_finds_its_data_from_anywhere(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    write_config(parse_config(CONFIGS["dpo"], folder=tmp_path), tmp_path / "out")
    again = load_config(tmp_path / "out" / "config.yaml")
    assert again.data.datasets[0].path == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"lora_r": 4}, "lora_r"),
        ({"lora_target_linear": True}, "lora_target_linear"),
        ({"peft": {"loftq_config": {"loftq_bits": 8}}}, "peft"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"lora_alpha": 4, "lora_dropout": 0.1, "loraplus_lr_ratio": 2.0, "output_dir": "elsewhere"}, None),
    ],
)
def test_a_resume_refuses_keys_that_choose_other_weights(keys, refused, tmp_path):
    before = {**PAIRS, "rl": "dpo", **LORA}
    write_config(parse_config(before, folder=tmp_path), tmp_path)
    changed = changed_keys(parse_config({**before, **keys}, folder=tmp_path), tmp_path)
    with (
        pytest.raises(UserError, match=rf"resume: {refused}.* \(.* then, .* now\) changed since")
        if refused
        else nullcontext()
    ):
        require_same_resume_keys(changed, tmp_path / "checkpoint-1", "cosine")


def test_a_resume_refuses_fewer_steps_than_were_taken(tmp_path):
    with pytest.raises(UserError, match=r"max_steps: 25 was passed before .*checkpoint-60\. Set max_steps above 60"):
        require_steps_left(tmp_path / "checkpoint-60", 25)
    for checkpoint, steps in ((None, 25), (tmp_path / "checkpoint-60", None), (tmp_path / "checkpoint-60", 60)):
        require_steps_left(checkpoint, steps)


def test_changed_keys_have_both_values(tmp_path):
    before = {**PAIRS, "rl": "dpo", "max_steps": 4}
    write_config(parse_config(before, folder=tmp_path), tmp_path)
    rows = [{**PAIRS["datasets"][0], "split": "train[:9]"}]
    now = parse_config({**before, "max_steps": None, "rl_beta": 0.3, "datasets": rows}, folder=tmp_path)
    assert changed_keys(now, tmp_path) == {
        "max_steps": "max_steps (4 then, unset now)", "rl_beta": "rl_beta (0.1 then, 0.3 now)",
        "datasets": 'datasets[0].split (unset then, "train[:9]" now)',
    }  # fmt: skip


def test_each_log_is_one_line_that_every_parser_reads(tmp_path):
    text = written(tmp_path, {"loss": 0.5}, {"loss": float("nan"), "grad_norm": float("inf")}, {"train_runtime": 3.0})
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": "nan", "grad_norm": "inf"},
    ]


def test_other_ranks_write_nothing(tmp_path):
    MetricsFile(tmp_path).on_log(None, TrainerState(is_world_process_zero=False), None, logs={"loss": 1.0})
    assert not (tmp_path / METRICS).exists()


def test_lines_after_a_step_and_half_lines_are_cut(tmp_path):
    written(tmp_path, {"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0})
    file = tmp_path / METRICS
    file.write_text(file.read_text() + '{"step": 2, "lo')
    cut_metrics(tmp_path, 2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
    cut_metrics(tmp_path, -1)
    assert file.read_text() == ""
    cut_metrics(tmp_path / "nowhere", 3)


def test_what_a_run_reports_is_named_at_its_end(tmp_path):
    rows = [{"step": step, "loss": 1.0, "grad_norm": 0.5 if step < 5 else 0.0} for step in range(1, 20)]
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert named_verdicts(tmp_path) == ""
    (tmp_path / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert named_verdicts(tmp_path) == "alarm 'no gradient'"
