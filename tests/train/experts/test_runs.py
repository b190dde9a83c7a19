"""Whole runs on a mixture of experts from YAML: sampled and trained, with adapters on experts, resumed."""

import json

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from made_runs import metrics_of, write_config, write_model, write_online
from upweight.config import load_config
from upweight.runs.files import EXPERT_LOAD
from upweight.train.run import train

EXPERTS = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def test_an_online_run_balances_its_routers(tmp_path):
    config = write_online(tmp_path, write_model(tmp_path / "model", "qwen3_moe"), max_steps=2)
    train(load_config(config))
    rows = [row for row in metrics_of(tmp_path / "out") if "aux_loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"router/entropy", "router/max_load", "router/unused_experts"} <= rows[0].keys()
    assert rows[0]["forwarded_share"] == 1
    loads = [json.loads(line) for line in (tmp_path / "out" / EXPERT_LOAD).read_text().splitlines()]
    assert [row["step"] for row in loads] == [1, 2]


def test_adapters_of_experts_are_trained_saved_and_resumed(tmp_path):
    model = write_model(tmp_path / "model", "qwen3_moe")
    keys = {**EXPERTS, "num_epochs": None, "max_steps": 4, "save_steps": 2, "val_set_size": 0}
    train(load_config(write_config(tmp_path, model, **keys)))
    whole = trained_weights(tmp_path / "out", model)
    moved = [name for name, weight in whole.items() if "lora_B" in name and float(weight.abs().max()) > 0]
    assert any("experts" in name for name in moved)
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    train(load_config(write_config(tmp_path, model, **keys, resume_from_checkpoint=checkpoint)))
    resumed = trained_weights(tmp_path / "out", model)
    assert all(torch.allclose(resumed[name], weight, atol=1e-6) for name, weight in whole.items())


def trained_weights(folder, base):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return {name: weight.detach() for name, weight in model.named_parameters() if "lora" in name}
