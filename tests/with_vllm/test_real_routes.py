"""The experts that a real vLLM server on the CPU returns with its completions."""

import os
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from made_runs import write_model, write_online
from made_vllm import experts_chosen
from tiny_models import drawn
from upweight.engine.routing import install_routing
from upweight.rollout.sampling_params import completion_fields
from upweight.rollout.vllm.served_routes import ServedRoutes
from upweight.rollout.vllm.server import completions_of
from upweight.rollout.vllm.token_route import GENERATE, choices_of, token_request
from upweight.types import Sampling
from with_vllm.real_server import PYTHON, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# vLLM's kernel of experts on CPUs takes multiples of 32; the first layer has none.
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "mlp_only_layers": [0], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
RECORDING = Path(PYTHON).parents[1] / "recording"  # vLLM 0.30: later ones record experts with Triton only, on GPUs
PROMPTS = [drawn(seed, 3 + seed).tolist() for seed in range(6)]


def test_the_experts_are_those_of_the_routers(tmp_path):
    # New weights of a mixture are not sent here: after a reload this vLLM computes others on a CPU.
    model = write_model(tmp_path / "model", "qwen3_moe", **SIZES)
    config = write_online(tmp_path, model)
    content = yaml.safe_load(config.read_text())
    content["trl"] |= {"use_vllm": True, "routing_replay": True}
    config.write_text(yaml.safe_dump(content))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(RECORDING), os.environ.get("PYTHONPATH")]))}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    routes = ServedRoutes(install_routing(policy))
    fields = completion_fields(3, Sampling(12), []) | {"return_token_ids": True}
    with running(config, env=env) as server:
        for prompt in PROMPTS:
            body = {**token_request(prompt, fields), "model": str(model)}
            answer = httpx.post(server.url + GENERATE, json=body, timeout=120).raise_for_status().json()
            for one in completions_of(choices_of(answer), prompt, 3, 0, routes):
                ids = [*prompt, *one.ids]
                assert one.routes is not None
                right = torch.tensor(experts_chosen(policy, ids[:-1])[:, 1:])
                assert torch.equal(torch.tensor(one.routes[:-1]).sort(-1).values.long(), right.sort(-1).values)
                with torch.no_grad():
                    logps = policy(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                chosen = logps.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
                torch.testing.assert_close(chosen, torch.tensor(one.logps), atol=1e-4, rtol=0)
