"""Routing replay with a real vLLM server on the CPU: the experts that it returns, and a run that trains with them."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from made_runs import metrics_of, write_model, write_online
from made_vllm import experts_chosen
from tiny_models import drawn
from upweight.config import load_config
from upweight.engine.routing import install_routing
from upweight.rollout.vllm.served_routes import ServedRoutes
from upweight.rollout.vllm.server import VllmServer
from upweight.train.run import train
from upweight.types import Sampling
from with_vllm.real_server import PYTHON, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# vLLM's kernel of experts on CPUs takes multiples of 32; the first layer has none.
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "mlp_only_layers": [0], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
RECORDING = Path(PYTHON).parents[1] / "recording"  # vLLM 0.30, the last whose runner for CPUs records experts
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
PROMPTS = [drawn(seed, 3 + seed).tolist() for seed in range(6)]


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **SIZES)


def replaying(folder, model, url=None):
    """A config with routing replay, two steps on each rollout, and a learning rate that moves routers."""
    file = write_online(folder, model, learning_rate=0.1, lr_scheduler="constant", max_steps=4, bf16=False, **LORA)
    content = yaml.safe_load(file.read_text())
    content["trl"] |= {"use_vllm": True, "routing_replay": True, "num_iterations": 2}
    if url is not None:
        content["trl"] |= {"vllm_server_base_url": url, "vllm_server_timeout": 300}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
def server(served_model, tmp_path_factory):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(RECORDING), os.environ.get("PYTHONPATH")]))}
    with running(replaying(tmp_path_factory.mktemp("served"), served_model), env=env) as started:
        yield started


def test_the_experts_are_those_of_the_routers(server, served_model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(served_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 300.0}
    routes = ServedRoutes(install_routing(base))
    backend = VllmServer(server.url, model, AutoTokenizer.from_pretrained(served_model), routes=routes, **options)
    backend.sync(0)
    for prompt, group in zip(PROMPTS, backend.generate(PROMPTS, 3, Sampling(12)), strict=True):
        for one in group:
            ids = [*prompt, *one.ids]
            assert one.routes is not None
            right = experts_chosen(model, ids[:-1])[:, 1:]
            assert (torch.tensor(one.routes[:-1]).sort(-1).values == torch.tensor(right).sort(-1).values).all()
    backend.close()


def test_a_run_trains_with_the_experts_of_the_server(server, served_model, tmp_path):
    train(load_config(replaying(tmp_path, served_model, server.url)))
    rows = [row for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert all(row["router/rerouted_tokens"] == 0 for row in rows)
    assert rows[0]["router/rerouted_choices"] == 0
    assert rows[1]["router/rerouted_choices"] > 0  # the second step on a rollout: the routers have moved
