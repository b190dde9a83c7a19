"""Images under FSDP2 and ZeRO: two ranks, of which one may have no image in a step, train the weights of one."""

import json

import pytest
import torch

pytest.importorskip("PIL")


from safetensors.torch import load_file
from transformers import AutoProcessor

from made_runs import largest_difference, metrics_of, on_ranks, write_config
from tiny_vision import drawn_image, processor, vision_model
from upweight.config import load_config
from upweight.models import processor as reading
from upweight.models.shards import any_sharded, gathered_weights
from upweight.train.run import build, train

LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4}
TOWER_TOO = {**LORA, "freeze_vision": False}
QUICK = {
    "sft qwen2_5_vl": {},
    "dpo gemma3": {"freeze_vision": True},
    "grpo idefics3": TOWER_TOO,
}
MORE = {
    "sft gemma3": LORA,
    "sft idefics3": TOWER_TOO,
    "sft llava": {"gradient_checkpointing": True},
    "sft llava_next": {},
    "sft mistral3": {},
    "sft internvl": {},
    "sft smolvlm": {"freeze_vision": True},
    "sft qwen3_vl": {},
    "dpo qwen2_5_vl": TOWER_TOO,
    "dpo idefics3": {},
    "reward llava": {},
    "grpo qwen2_5_vl": LORA,
    "grpo gemma3": {},
}
GENERATES = "grpo gemma3"  # by transformers' `generate`, whose random numbers depend on the batch
ZERO = {
    name: (QUICK | MORE)[name] for name in [*QUICK, "sft llava_next", "sft qwen3_vl", "dpo qwen2_5_vl", "grpo gemma3"]
}
STEPS, WITH_IMAGE = 3, (0, 3)  # of the rows: the last step has no image
REWARD = """
def checksum(completions, images, **columns):
    assert len(images) == len(completions)
    return [sum(map(ord, one[0]["content"])) % 101 / 100 for one in completions]
"""


def write_rows(folder, method):
    """Two rows for each step; in the first two steps, one of them has an image, of another rank each."""
    rows = []
    for number in range(2 * STEPS):
        content = [{"type": "text", "text": f"which {number}?"}]
        if number in WITH_IMAGE:
            drawn_image(number).save(folder / f"{number}.png")
            content.insert(0, {"type": "image", "path": str(folder / f"{number}.png")})
        asked, sides = [{"role": "user", "content": content}], ["this", "that one"]
        sides = [[{"role": "assistant", "content": side}] for side in sides]
        row = {"messages": asked + sides[0]} if method == "sft" else {"prompt": asked}
        rows.append(row | ({"chosen": sides[0], "rejected": sides[1]} if method in ("dpo", "reward") else {}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def write_case(folder, case, ranks, keys):
    """Write the model, rows and config of a case for so many ranks."""
    method, kind = case.split()
    folder.mkdir(parents=True)
    vision_model(kind).save_pretrained(folder / "model")
    processor(kind).save_pretrained(folder / "model")
    given = {
        "rl": None if method in ("sft", "reward") else method,
        "reward_model": True if method == "reward" else None,
    }
    given |= {"datasets": [{"path": str(write_rows(folder, method))}], "sequence_len": 256, "curriculum_sampling": True}
    given |= {"max_steps": STEPS, "num_epochs": None, "gradient_accumulation_steps": 1, "save_strategy": "no"}
    # SGD: a difference of gradients by rounding is not made a large one, as Adam makes of those near zero.
    given |= {"micro_batch_size": 2 // ranks, "optimizer": "sgd", "learning_rate": 0.05, "weight_decay": 0.1}
    if method == "grpo":
        module = f"rewards_{folder.name}_{ranks}".replace(" ", "_")
        (folder / f"{module}.py").write_text(REWARD)
        trl = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "reward_funcs": [f"{module}.checksum"]}
        given |= {"trl": trl, "micro_batch_size": 8 // ranks}
    return write_config(folder, folder / "model", **{**given, **keys})


def train_case(file, case):
    """Train from a config; processors of some kinds cannot be loaded without torchvision, and are made in code."""
    reading._load_processor = lambda section, folder: processor(case.split()[1])
    trainer = build(load_config(file), trains=True)
    trainer.train()
    return trainer


def run_rank(folder, cases):
    for case in cases:
        trainer = train_case(folder / case / "config.yaml", case)
        model = trainer.accelerator.unwrap_model(trainer.model)
        assert any_sharded(model)
        weights = gathered_weights(model, None)
        if trainer.is_world_process_zero():
            torch.save([weights, trainer.state.log_history], folder / f"{case}.pt")


def run_unsharded(folder, case):
    trainer = train_case(folder / "config.yaml", case)
    if trainer.is_world_process_zero():
        torch.save([trainer.model.state_dict(), trainer.state.log_history], folder / "alone.pt")


def trained_alone(folder, case, keys):
    """Weights and log of one rank; of two with whole weights, where other numbers of ranks sample other tokens."""
    if case != GENERATES:
        trainer = train_case(write_case(folder, case, 1, keys), case)
        return trainer.model.state_dict(), trainer.state.log_history
    write_case(folder, case, 2, keys)
    on_ranks(run_unsharded, 2, folder, case)
    weights, log = torch.load(folder / "alone.pt", weights_only=False)
    return {name.removeprefix("module."): value for name, value in weights.items()}, log


def compare(folder, cases, sharding, monkeypatch):
    for case, keys in cases.items():
        write_case(folder / case, case, 2, {**keys, **sharding})
    on_ranks(run_rank, 2, folder, list(cases))
    monkeypatch.setattr(reading, "_load_processor", None)
    for case, keys in cases.items():
        found, log = torch.load(folder / f"{case}.pt", weights_only=False)
        start = vision_model(case.split()[1]).state_dict()  # adapters begin with zeros
        weights, expected_log = trained_alone(folder / "alone" / case, case, keys)
        right = {name: weights[name] for name in found}
        assert largest_difference(found, right) < 1e-5, case
        moved = {name for name, value in found.items() if float((value - start.get(name, 0)).abs().max()) > 1e-5}
        tower = [name for name in moved if "vision" in name or "visual" in name]
        if "adapter" in keys:
            moved, tower = ([name for name in names if "lora_B" in name] for names in (moved, tower))
        assert moved, case
        assert bool(tower) != keys.get("freeze_vision", "adapter" in keys), case
        for line, expected in zip(log[:STEPS], expected_log[:STEPS], strict=True):
            for name in ("loss", "grad_norm"):
                assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), case


def test_shards_of_models_that_read_images_train_the_weights_of_one_rank(tmp_path, monkeypatch):
    compare(tmp_path, QUICK, {"fsdp": True}, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_models_are_sharded(case, tmp_path, monkeypatch):
    compare(tmp_path, {case: MORE[case]}, {"fsdp": True}, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", ZERO)
def test_zero_3_trains_the_weights_of_one_rank(case, tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    # Where no row of a step has an image, DeepSpeed takes the tower's gradient for zero, and decays its weights still.
    compare(tmp_path, {case: {**ZERO[case], "weight_decay": 0.0}}, {"deepspeed": "zero3.json"}, monkeypatch)


def run(file, resume):
    train(load_config(file), resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{"fsdp": True}, {"deepspeed": "zero3.json"}], ids=["fsdp", "zero"])
def test_a_sharded_run_with_images_resumes_exactly_and_saves_its_processor(sharding, tmp_path):
    if "deepspeed" in sharding:
        pytest.importorskip("deepspeed")
    keys = {"save_strategy": "steps", "save_steps": 1, "optimizer": "adamw_torch", **TOWER_TOO, **sharding}
    file, out = write_case(tmp_path / "run", "sft llava", 2, keys), tmp_path / "run" / "out"
    on_ranks(run, 2, file, False)
    right, result = metrics_of(out), load_file(out / "adapter_model.safetensors")
    for step in range(1, STEPS + 1):
        assert type(AutoProcessor.from_pretrained(out / f"checkpoint-{step}")).__name__ == "LlavaProcessor"
    for step in range(2, STEPS + 1):
        (out / f"checkpoint-{step}" / "whole.json").unlink()
    (out / "adapter_model.safetensors").unlink()
    on_ranks(run, 2, file, True)
    assert metrics_of(out) == right
    assert largest_difference(load_file(out / "adapter_model.safetensors"), result) == 0
    assert type(AutoProcessor.from_pretrained(out)).__name__ == "LlavaProcessor"
