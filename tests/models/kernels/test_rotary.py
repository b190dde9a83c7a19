"""Rotary positions in fewer launches, against the functions that they stand in for."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_models import tiny
from upweight.models.kernels.rotary import NAME, fused_form, same_rotation
from upweight.models.patches import fuse_rotary


def stock_of(kind):
    attention = next(m for m in tiny(kind).modules() if type(m).__name__.endswith("Attention"))
    return getattr(sys.modules[type(attention).__module__], NAME)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 6, heads, 8, generator=generator, dtype=dtype) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 6, 8, generator=generator, dtype=dtype)
    return q.transpose(1, 2).requires_grad_(), k.transpose(1, 2).requires_grad_(), cos, sin


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text"])
def test_values_strides_and_gradients_are_those_of_the_stock_function(kind):
    stock = stock_of(kind)
    q, k, cos, sin = inputs()
    fused = fused_form(stock)
    assert same_rotation(stock, fused)
    for right, found in zip(stock(q, k, cos, sin), fused(q, k, cos, sin), strict=True):
        assert type(found.grad_fn).__name__ == "_RotatedBackward"
        assert found.stride() == right.stride()
        torch.testing.assert_close(found, right)
        seed = torch.randn_like(right)
        grads = [torch.autograd.grad(out, (q, k), seed, allow_unused=True) for out in (found, right)]
        torch.testing.assert_close(*grads)


def test_half_precision_is_rounded_no_more_often():
    stock = stock_of("qwen2")
    exact = stock(*inputs())
    halves = [x.detach().bfloat16() for x in inputs()]
    gaps = []
    for form in (fused_form(stock), stock):
        both = zip(form(*halves), exact, strict=True)
        gaps.append(sum(float((rounded.double() - right).abs().sum()) for rounded, right in both))
    assert gaps[0] <= gaps[1]


def test_other_rotations_are_left_alone():
    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        return tuple(x * cos.unsqueeze(1) + x.flip(-1) * sin.unsqueeze(1) for x in (q, k))

    def three_axes(q, k, cos, sin, sections):
        return q, k

    assert not same_rotation(interleaved, fused_form(interleaved))
    assert not same_rotation(three_axes, fused_form(three_axes))


def test_what_is_not_plain_runs_the_stock_function():
    stock = stock_of("llama")
    q, k, cos, sin = inputs(torch.bfloat16)
    wide = cos.float(), sin.float()
    for given, options in (((q, k, *wide), {}), ((q, k, cos, sin), {"unsqueeze_dim": 1})):
        out = fused_form(stock)(*given, **options)[0]
        assert type(out.grad_fn).__name__ != "_RotatedBackward"
        torch.testing.assert_close(out, stock(*given, **options)[0])


class Launches(TorchDispatchMode):
    """Counts operators that compute something."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_patch_can_go_when_the_stock_function_starts_as_few_operators():
    given, counts = [x.detach() for x in inputs()], []
    for form in (stock_of("qwen2"), fused_form(stock_of("qwen2"))):
        with Launches() as launches:
            form(*given)
        counts.append(launches.count)
    assert counts[1] == 6
    assert counts[0] > counts[1]


def test_nothing_changes_on_a_cpu():
    stock = stock_of("llama")
    fuse_rotary(tiny("llama"))
    assert stock_of("llama") is stock


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_on_a_gpu_is_the_same(kind):
    model = tiny(kind).cuda()
    ids = torch.randint(2, 30, (2, 9), device="cuda")
    found = []
    for _ in range(2):
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        found.append([out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        fuse_rotary(model)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
