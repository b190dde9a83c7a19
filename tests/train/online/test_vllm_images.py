"""Runs whose prompts have images, sampled from a server that speaks vLLM's routes."""

import json

import pytest
import yaml

pytest.importorskip("PIL")

from PIL import Image

from made_runs import metrics_of, write_online
from made_vllm import FakeVllm
from tiny_vision import processor, vision_model
from upweight.config import load_config
from upweight.models.processor import attach_processor, image_reader
from upweight.rollout.vllm.token_route import GENERATE
from upweight.train.policy import image_problems
from upweight.train.run import train

COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220)}
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True}


def served(folder):
    """A model in a folder, and what reads its images."""
    model = vision_model("idefics3")
    model.save_pretrained(folder)
    processor("idefics3").save_pretrained(folder)
    return folder, image_reader(attach_processor(processor("idefics3"), model.config))


def config(folder, model, url, trl=None, **keys):
    rows = []
    for colour, rgb in COLOURS.items():
        Image.new("RGB", (40, 40), rgb).save(folder / f"{colour}.png")
        content = [{"type": "image", "path": f"{colour}.png"}, {"type": "text", "text": "?"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": colour})
    rows.append({"prompt": [{"role": "user", "content": "say a"}], "answer": "a"})
    keys = {"max_steps": 3, "bf16": False, "chat_template": None, **keys}
    file = write_online(folder, model, **keys)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    content = yaml.safe_load(file.read_text())
    content["trl"] |= {"use_vllm": True, "vllm_server_base_url": url, "vllm_server_timeout": 20, **(trl or {})}
    file.write_text(yaml.safe_dump(content))
    return load_config(file)


@pytest.mark.parametrize("keys", [LORA, {}])
def test_grpo_samples_prompts_with_images_from_a_server(tmp_path, keys):
    model, reader = served(tmp_path / "model")
    fake = FakeVllm(model, reader=reader)
    try:
        train(config(tmp_path, model, fake.url, **keys))
    finally:
        fake.close()
    asked = [body for body in fake.asked(GENERATE) if body["sampling_params"]["n"] == 4]
    assert asked
    assert all(len(body["content_parts"]) == 1 and body["token_ids"].count(reader.token_id) == 1 for body in asked)
    name = "sampling/sampling_logp_difference/mean"  # missing where no reward of a step differs
    apart = [line[name] for line in metrics_of(tmp_path / "out") if name in line]
    assert apart
    # The sampler leaves the image token out of its distribution: a random model gives it about 1 in 300.
    assert max(apart) < 0.02
    assert bool(fake.asked("/reset_encoder_cache")) == (not keys)


@pytest.mark.parametrize(
    ("trl", "words"),
    [({"vllm_weight_transfer": "nccl"}, "sent through a folder alone"), ({}, ""), ({"vllm_mode": "colocate"}, "")],
)
def test_what_was_not_shown_to_work_is_refused(tmp_path, trl, words):
    (tmp_path / "model").mkdir()
    keys = config(tmp_path, tmp_path / "model", "http://127.0.0.1:9", trl)
    problems = list(image_problems(keys, vision_model("idefics3"), 1))
    assert len(problems) == bool(words)
    assert not words or words in problems[0]


def test_sharded_weights_are_not_compared_with_a_server_that_reads_images(tmp_path):
    (tmp_path / "model").mkdir()
    keys = config(tmp_path, tmp_path / "model", "http://127.0.0.1:9", fsdp=True)
    (problem,) = image_problems(keys, vision_model("idefics3"), 2)
    assert problem.startswith("fsdp, deepspeed: sharded weights are not compared")
