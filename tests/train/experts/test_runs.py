"""Whole runs on a mixture of experts from YAML: sampled and trained, with adapters on experts, resumed."""

import json

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from made_runs import metrics_of, on_ranks, write_config, write_model, write_online
from made_vllm import FakeVllm
from upweight.cli.export.run import run_merge
from upweight.config import load_config
from upweight.errors import UserError
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


PACKED = {**EXPERTS, "adapter": "qlora", "load_in_4bit": True, "quantize_moe_experts": True}


def test_adapters_of_quantised_experts_are_trained_resumed_and_merged(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")  # `make test-quant`
    model = write_model(tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    keys = {**PACKED, "num_epochs": None, "max_steps": 4, "save_steps": 2, "val_set_size": 0, "learning_rate": 0.01}
    train(load_config(write_config(tmp_path, model, **keys)))
    whole = trained_weights(tmp_path / "out", model)
    moved = [name for name, weight in whole.items() if "lora_B" in name and float(weight.abs().max()) > 0]
    assert any("experts" in name for name in moved)
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    train(load_config(write_config(tmp_path, model, **keys, resume_from_checkpoint=checkpoint)))
    resumed = trained_weights(tmp_path / "out", model)
    assert all(torch.allclose(resumed[name], weight, atol=1e-6) for name, weight in whole.items())
    capsys.readouterr()
    run_merge(str(tmp_path / "out"), [], output=None, check=True)  # into the weights as stored
    assert float(capsys.readouterr().out.split()[-1]) < 1e-3


def test_quantised_experts_are_sampled_as_they_are_trained(tmp_path):
    pytest.importorskip("bitsandbytes")  # `make test-quant`
    model = write_model(tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    train(load_config(write_online(tmp_path, model, **PACKED, learning_rate=0.01, max_steps=3)))
    rows = [row for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert len(rows) == 3
    assert all(row["sampling/logp_gap"] < 1e-4 for row in rows)


def _train(file):
    train(load_config(file))


def test_quantised_experts_on_two_ranks_and_with_less_memory(tmp_path):
    pytest.importorskip("bitsandbytes")  # `make test-quant`
    model = write_model(tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    keys = {**PACKED, "num_epochs": None, "max_steps": 3, "val_set_size": 0, "learning_rate": 0.01}
    more = {"alone": {}, "lean": {"memory": "lean"}, "ranks": {"micro_batch_size": 1}}
    for name, changes in more.items():
        (tmp_path / name).mkdir()
        file = write_config(tmp_path / name, model, **keys, **changes)
        on_ranks(_train, 2, file) if name == "ranks" else _train(file)
    runs = [[row for row in metrics_of(tmp_path / name / "out") if "loss" in row] for name in more]
    for right, *others in zip(*runs, strict=True):
        for row in others:
            for name in ("loss", "grad_norm"):
                assert row[name] == pytest.approx(right[name], rel=1e-5)


def trained_weights(folder, base):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return {name: weight.detach() for name, weight in model.named_parameters() if "lora" in name}


REPLAYED = ("router/rerouted_choices", "router/rerouted_tokens")


def replayed(tmp_path, replay, **keys):
    """The metrics of a run with two steps on each rollout, at a learning rate that changes what routers choose."""
    model = write_model(tmp_path / "model", "qwen3_moe")
    config = write_online(tmp_path, model, learning_rate=0.01, lr_scheduler="constant", max_steps=4, **keys)
    content = yaml.safe_load(config.read_text())
    content["trl"] |= {"routing_replay": replay, "num_iterations": 2}
    config.write_text(yaml.safe_dump(content))
    train(load_config(config))
    return [row for row in metrics_of(tmp_path / "out") if "loss" in row]


def test_the_experts_of_the_sampler_are_replayed(tmp_path):
    rows = replayed(tmp_path, True)
    assert all(row["router/rerouted_tokens"] == 0 for row in rows)
    assert rows[0]["router/rerouted_choices"] == 0
    assert rows[0]["sampling/logp_gap"] < 1e-4
    assert rows[1]["router/rerouted_choices"] > 0  # the second step on a rollout: the routers have moved


def test_differences_are_measured_without_a_replay(tmp_path):
    rows = replayed(tmp_path, "measure")
    assert rows[0]["router/rerouted_tokens"] == 0
    assert rows[1]["router/rerouted_tokens"] >= rows[1]["router/rerouted_choices"] > 0
    (tmp_path / "off").mkdir()
    off = replayed(tmp_path / "off", False)
    assert not any(name in row for row in off for name in REPLAYED)
    assert [row["loss"] for row in off] == [row["loss"] for row in rows]


def test_the_experts_of_a_server_are_replayed(tmp_path):
    model = write_model(tmp_path / "model", "qwen3_moe")
    server = FakeVllm(model)
    server.records_experts = True
    config = write_online(tmp_path, model, learning_rate=0.01, lr_scheduler="constant", max_steps=4, bf16=False)
    content = yaml.safe_load(config.read_text())
    content["trl"] |= {"routing_replay": True, "num_iterations": 2, "use_vllm": True}
    content["trl"] |= {"vllm_server_base_url": server.url, "vllm_server_timeout": 20}
    config.write_text(yaml.safe_dump(content))
    train(load_config(config))
    server.close()
    rows = [row for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert all(row["router/rerouted_tokens"] == 0 for row in rows)
    assert rows[0]["router/rerouted_choices"] == 0
    assert rows[1]["router/rerouted_choices"] > 0  # the second step on a rollout: the routers have moved
    assert rows[0]["sampling/logp_gap"] < 1e-4


def test_a_run_with_adapters_on_experts_replays_and_resumes(tmp_path):
    keys = {**EXPERTS, "save_steps": 1}
    whole = replayed(tmp_path, True, **keys)
    assert all(row["router/rerouted_tokens"] == 0 for row in whole)
    checkpoint = str(tmp_path / "out" / "checkpoint-1")  # within a rollout, whose experts it holds
    rest = replayed(tmp_path, True, **keys, resume_from_checkpoint=checkpoint)
    after = [{name: row[name] for name in (*REPLAYED, "loss")} for row in rest if row["step"] > 1]
    before = [{name: row[name] for name in (*REPLAYED, "loss")} for row in whole if row["step"] > 1]
    assert after == [pytest.approx(row, abs=1e-6) for row in before]


def test_a_model_without_experts_is_refused(tmp_path):
    config = write_online(tmp_path, write_model(tmp_path / "model"))
    content = yaml.safe_load(config.read_text())
    content["trl"]["routing_replay"] = True
    config.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"routing_replay: .*no mixture"):
        train(load_config(config))
