"""Fused norms and gated blocks against the modules they stand in for."""

from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tiny_models import tiny
from upweight.models.kernels.fused_layers import (
    _gated_mlp,
    _norm,
    _silu_gradients,
    _silu_product,
    concatenated_outputs,
    fuse_layers,
    fuse_projections,
    same_output,
)
from upweight.models.patches import add_adapters_in_place

PLAIN = ["llama", "qwen2", "qwen3", "mistral", "olmo2", "smollm3"]


def modules_of(kind: str, ending: str) -> list[nn.Module]:
    return [m for m in tiny(kind).modules() if type(m).__name__.endswith(ending)]


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_norms_and_blocks_prove_themselves(kind: str):
    assert all(same_output(norm, _norm) for norm in modules_of(kind, "RMSNorm"))
    assert all(same_output(block, _gated_mlp) for block in modules_of(kind, "MLP"))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_other_norms_and_blocks_do_not(kind: str):
    assert not any(same_output(norm, _norm) for norm in modules_of(kind, "RMSNorm"))
    assert not any(same_output(block, _gated_mlp) for block in modules_of(kind, "MLP"))


@pytest.mark.parametrize("factor", [1e-3, 0])
def test_weights_that_are_small_or_not_there_yet_hide_no_other_activation(factor: float):
    for kind, is_plain in (("llama", True), ("gemma3_text", False)):
        for block in modules_of(kind, "MLP"):
            with torch.no_grad():
                for weight in block.parameters():
                    weight.mul_(factor)
            assert same_output(block, _gated_mlp) is is_plain


def test_slopes_are_autograds():
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad = torch.randn(5, 7, dtype=torch.float64)
    right = torch.autograd.grad(_silu_product(gate, up), (gate, up), grad)
    for found, wanted in zip(_silu_gradients(grad, gate.detach(), up.detach()), right, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


def test_nothing_changes_on_a_cpu():
    model = tiny("llama")
    fuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_fused_model_is_the_same(kind: str):
    model = tiny(kind).cuda().train()
    ids = torch.randint(1, 50, (2, 33), device="cuda")
    results = []
    for _ in range(2):
        model.zero_grad()
        logits = model(ids).logits
        logits.square().mean().backward()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, logits)
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        fuse_layers(model)
    fused = {type(module).__name__ for module in model.modules() if "forward" in vars(module)}
    assert any(name.endswith(("Norm", "MLP")) for name in fused) == (kind != "gemma2")
    for stock, found in zip(*results, strict=True):
        torch.testing.assert_close(found, stock, atol=1e-5, rtol=1e-4)


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_with(targets: list[str]) -> Any:
    """A tiny model, with adapters that change what it computes where targets are named."""
    torch.manual_seed(0)
    model: Any = tiny("qwen2")
    if targets:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False))
    model.to("cuda", torch.bfloat16).eval()
    add_adapters_in_place(model)
    return model


def close(found: Tensor, right: Tensor) -> None:
    """Equal up to what bfloat16 leaves after some layers."""
    assert float((found - right).float().abs().mean()) < 0.03 * float(right.float().abs().mean())
    torch.testing.assert_close(found, right, atol=0.1, rtol=0.1)


def test_on_a_cpu_layers_stay_alone():
    model = tiny("qwen2")
    fuse_projections(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("targets", [[], LINEAR], ids=["plain", "adapted"])
def test_query_key_and_value_together(targets: list[str]):
    layers = [getattr(next(m for m in model_with(targets).modules() if hasattr(m, "q_proj")), n) for n in LINEAR[:3]]
    x = torch.randn(6, 1, layers[0].in_features, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        right = torch.cat([layer(x) for layer in layers], -1)
        found = concatenated_outputs(x, layers)
        assert found is not None
        torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)
        assert concatenated_outputs(x.expand(-1, 100, -1), layers) is None  # not few
    assert concatenated_outputs(x, layers) is None  # gradients


@pytest.mark.gpu
@pytest.mark.parametrize("targets", [[], LINEAR, ["q_proj", "v_proj"]], ids=["plain", "adapted", "in part"])
@pytest.mark.parametrize("rows", [6, 300])
def test_compiled_layers_are_the_same(targets: list[str], rows: int):
    model = model_with(targets)
    ids = torch.randint(1, 50, (rows, 1), device="cuda")
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
        fuse_layers(model)
        assert any("_fused" in vars(module) for module in model.modules())
        close(model(ids, use_cache=False).logits, right)
        layers = [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]
        forward = torch.compile(type(layers[0]).forward)
        for layer in layers:
            layer.forward = MethodType(forward, layer)
        close(model(ids, use_cache=False).logits, right)
