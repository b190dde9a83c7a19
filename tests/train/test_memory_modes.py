"""What is learned does not depend on `memory`, and a run says what it set."""

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from made_runs import upweight, write_config, write_model, write_online
from tiny_models import tiny
from upweight.config import load_config, parse_config
from upweight.data.units import units_of
from upweight.engine.activations import enable_checkpointing
from upweight.methods import DPO, SFT
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels import tiled_mlp
from upweight.models.load import load_model
from upweight.models.memory import TokenBytes
from upweight.models.modules import unwrap_peft
from upweight.train.policy import CPU_TOKEN_BUDGET, make_policy
from upweight.train.run import build
from upweight.train.step import StepRunner

MODES = ("lean", "balanced", "fast")
LORA = {"adapter": "lora", "lora_r": 4, "lora_target_linear": True}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


@pytest.mark.parametrize(("method", "adapter"), [("dpo", {}), ("sft", LORA), ("grpo", {})])
def test_losses_are_the_same_in_all_modes(method, adapter, tmp_path):
    model = write_model(tmp_path / "model", num_hidden_layers=3)
    by_mode = {}
    for mode in MODES:
        keys = {"memory": mode, "max_steps": 3, "output_dir": str(tmp_path / mode), **adapter}
        if method == "grpo":
            trl = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
            config = write_online(tmp_path, model, **keys)
            overrides = [f"trl.{name}={value}" for name, value in trl.items()]
        elif method == "sft":
            config = write_config(tmp_path, model, rl=None, **keys)
            rows = [{"text": "a quick brown fox jumps over a lazy dog " * (1 + n % 7)} for n in range(16)]
            (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            overrides = [f"datasets=[{{path: {tmp_path / 'texts.jsonl'}, type: completion}}]"]
        else:
            config, overrides = write_config(tmp_path, model, **keys), []
        # Rows and the head's chunks are cut in the lean mode, whatever the size of these models.
        cut = ["token_budget=64", "head_chunk_tokens=3"] if mode == "lean" else []
        done = upweight("train", config, *overrides, *cut)
        assert done.returncode == 0, done.stderr
        by_mode[mode] = losses(tmp_path / mode)
        summary = next(line for line in done.stderr.splitlines() if line.startswith("memory"))
        assert (f"'memory: {mode}' sets gradient_checkpointing: true" in summary) == (mode != "balanced")
    assert len(by_mode["balanced"]) == 3
    for mode in ("lean", "fast"):
        for found, right in zip(by_mode[mode], by_mode["balanced"], strict=True):
            assert found == pytest.approx(right, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("adapter", [{}, LORA])
@pytest.mark.parametrize("method", [DPO(), SFT()])
def test_modes_agree_in_bfloat16_to_its_rounding(method, adapter, tmp_path, monkeypatch):
    """Losses and gradients of the three modes, and as a measure of rounding those of the same model in float32."""
    monkeypatch.setattr(tiled_mlp, "TILE", 16)  # so that `lean` tiles rows of more than 64 tokens
    folder = write_model(tmp_path / "model", num_hidden_layers=3)
    losses, gradients = {}, {}
    for mode in (*MODES, "float32"):
        content = {"base_model": str(folder), "memory": "balanced" if mode == "float32" else mode, **adapter}
        # Rows and the head's chunks are cut in the lean mode, whatever the size of these models.
        content |= {"token_budget": 64, "head_chunk_tokens": 3} if mode == "lean" else {}
        losses[mode], gradients[mode] = step_of(method, parse_config(content, folder=tmp_path, fragment=True), mode)
    rounding = (gradients["balanced"] - gradients["float32"]).norm()
    for mode in ("lean", "fast"):
        assert losses[mode] == pytest.approx(losses["balanced"], rel=1e-2)
        assert (gradients[mode] - gradients["balanced"]).norm() <= rounding
    assert 0 < rounding < 0.2 * gradients["float32"].norm()


def step_of(method, config, mode):
    """The loss and the gradients of one step on units of different lengths."""
    dtype = torch.float32 if mode == "float32" else torch.bfloat16
    model = load_model(config.model, dtype, head="tokens", tokenizer=None, adapter=config.adapter, seed=0)
    torch.manual_seed(0)
    if config.adapter.kind is not None:
        model = attach_adapter(model, config.adapter)
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # or half of the gradients would be zero
                weight.data.normal_(0, 0.1)
    here, optim = torch.device("cpu"), config.optim
    policy = make_policy(model.train(), method, dtype, here, longest=96, optim=optim, section=config.model)
    runner = StepRunner(method, policy.engine, Accelerator(cpu=True), policy.token_budget, policy.reference, dtype)
    rng = np.random.default_rng(0)
    words = lambda length: rng.integers(2, 40, length).tolist()  # noqa: E731
    if method.name == "dpo":
        rows = [{"prompt_ids": words(9), "chosen_ids": words(5 + n), "rejected_ids": words(12 - n)} for n in range(6)]
    else:
        texts = [words(8 + 12 * n) for n in range(7)]
        rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    loss = runner.train(model, units_of(rows, method))
    return float(loss), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.requires_grad])


def test_lean_reaches_engine_and_sampler(tmp_path):
    config = load_config(write_online(tmp_path, write_model(tmp_path / "model"), memory="lean"))
    trainer = build(config, trains=True)
    base = unwrap_peft(trainer.model)
    assert base.__dict__["_activation_budget"] is None
    assert all(layer.gradient_checkpointing for layer in base.model.layers)
    assert (trainer.runner.token_budget, trainer.runner.engine.head_chunk) == (CPU_TOKEN_BUDGET, 256)
    trainer.train()
    assert trainer.rollouts.generator._sampler.bytes() < 64


def test_balanced_keeps_the_samplers_memory(tmp_path):
    trainer = build(load_config(write_online(tmp_path, write_model(tmp_path / "model"))), trains=True)
    trainer.train()
    assert trainer.rollouts.generator._sampler.bytes() > 1024


def test_fast_keeps_activations_on_a_cpu_as_far_as_memory_reaches():
    model = tiny("llama", num_hidden_layers=4).train()
    enable_checkpointing(model, keep=0.5)
    budget = model.__dict__["_activation_budget"]
    of_layer = 2 * TokenBytes.of(model.config).layer  # float32
    assert budget.bytes_for_token == of_layer
    budget.choose_kept_layers(100)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    budget.budget = 3 * of_layer * 100
    budget.choose_kept_layers(100)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, True, True, False]
