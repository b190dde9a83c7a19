"""Images on several ranks: the vision tower trains although the rows of a rank have no image."""

import json

import pytest

pytest.importorskip("PIL")

from safetensors.torch import load_file

from made_runs import metrics_of, on_ranks, write_config
from tiny_vision import drawn_image, processor, vision_model
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.run import train


def run(file):
    train(load_config(file))


def mixed_config(folder, model, **keys):
    """Steps of two rows: one with an image, one without."""
    rows = []
    for number in range(6):
        content = [{"type": "text", "text": f"which {number}?"}]
        if number % 2 == 0:
            drawn_image(number).save(folder / f"{number}.png")
            content.insert(0, {"type": "image", "path": str(folder / f"{number}.png")})
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "this"}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"rl": None, "datasets": [{"path": str(folder / "rows.jsonl")}], "sequence_len": 256, **keys}
    keys |= {"curriculum_sampling": True, "max_steps": 3, "num_epochs": None, "save_strategy": "no"}
    return write_config(folder, model, **keys)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_vision_tower_trains_on_ranks_without_images(checkpointing, tmp_path):
    model = tmp_path / "model"
    vision_model("llava").save_pretrained(model)
    processor("llava").save_pretrained(model)
    common = {"optimizer": "sgd", "learning_rate": 0.05, "gradient_checkpointing": checkpointing}
    folders = [tmp_path / "two", tmp_path / "one"]
    for folder in folders:
        folder.mkdir()
    on_ranks(run, 2, mixed_config(folders[0], model, micro_batch_size=1, **common))
    train(load_config(mixed_config(folders[1], model, micro_batch_size=2, **common)))
    ours, alone = (load_file(folder / "out" / "model.safetensors") for folder in folders)
    start = load_file(model / "model.safetensors")
    assert max(float((ours[name] - alone[name]).abs().max()) for name in alone) < 1e-5
    assert any(float((ours[name] - start[name]).abs().max()) > 1e-5 for name in alone if "vision_tower" in name)
    assert [line["loss"] for line in metrics_of(folders[0] / "out") if "loss" in line] == pytest.approx(
        [line["loss"] for line in metrics_of(folders[1] / "out") if "loss" in line], rel=1e-5
    )


def refused(file):
    with pytest.raises(UserError, match="use_reentrant: a rank whose rows have no image"):
        train(load_config(file))


def test_reentrant_checkpointing_of_a_trained_tower_is_refused_on_ranks(tmp_path):
    model = tmp_path / "model"
    vision_model("llava").save_pretrained(model)
    processor("llava").save_pretrained(model)
    keys = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    on_ranks(refused, 2, mixed_config(tmp_path, model, micro_batch_size=1, **keys))
