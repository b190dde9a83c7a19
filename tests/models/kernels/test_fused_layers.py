"""Fused norms and gated blocks against the modules they stand in for."""

import pytest
import torch
from torch import nn

from tiny_models import tiny
from upweight.models.kernels.fused_layers import _gated, _norm, _product, _slopes, fuse_layers, proven

PLAIN = ["llama", "qwen2", "qwen3", "mistral", "olmo2", "smollm3"]


def modules_of(kind: str, ending: str) -> list[nn.Module]:
    return [m for m in tiny(kind).modules() if type(m).__name__.endswith(ending)]


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_norms_and_blocks_prove_themselves(kind: str):
    assert all(proven(norm, _norm) for norm in modules_of(kind, "RMSNorm"))
    assert all(proven(block, _gated) for block in modules_of(kind, "MLP"))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_other_norms_and_blocks_do_not(kind: str):
    assert not any(proven(norm, _norm) for norm in modules_of(kind, "RMSNorm"))
    assert not any(proven(block, _gated) for block in modules_of(kind, "MLP"))


def test_slopes_are_autograds():
    gate, up = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    grad = torch.randn(5, 7, dtype=torch.float64)
    right = torch.autograd.grad(_product(gate, up), (gate, up), grad)
    for found, wanted in zip(_slopes(grad, gate.detach(), up.detach()), right, strict=True):
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
