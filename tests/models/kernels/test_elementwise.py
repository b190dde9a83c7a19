"""Rotations and casts as kernels, against torch's operators."""

import pytest
import torch

from upweight.models.kernels import rotary


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 12, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_are_torchs_to_the_last_bit(monkeypatch, dtype, heads):
    torch.manual_seed(0)
    x = torch.randn(2, 37, heads, 96, device="cuda").to(dtype).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, 1, 37, 96, device="cuda").to(dtype)
    grad = torch.randn(2, heads, 37, 96, device="cuda").to(dtype)  # laid out in another way than x
    found = []
    for kernels in (rotary.elementwise, None):
        monkeypatch.setattr(rotary, "elementwise", kernels)
        out = rotary._Rotated.apply(x, cos, sin)
        found.append((out, out.stride(), *torch.autograd.grad(out, x, grad)))
    for ours, right in zip(*found, strict=True):
        assert torch.equal(ours, right) if isinstance(ours, torch.Tensor) else ours == right


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_are_exact(dtype):
    from upweight.models.kernels.elementwise import widened

    values = torch.randn(7, 1031, device="cuda").to(dtype)
    assert torch.equal(widened(values), values.float())
    assert widened(values).dtype == torch.float32
    assert widened(values[:0]).shape == (0, 1031)
