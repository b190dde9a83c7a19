"""Weights in 8 bits: their rounding, their copies, and the kernels that read them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from upweight.models.kernels.int8_weights import Int8Weights, integers
from upweight.models.kernels.tiles import FEW_INT8_ROWS
from upweight.models.modules import replaced_forwards


def rounded(weight_FD: torch.Tensor) -> torch.Tensor:
    """The weight as 8 bits hold it."""
    step_F1 = weight_FD.abs().amax(1, keepdim=True) / 127
    return (weight_FD / step_F1).round() * step_F1


def linear(inputs: int = 24, outputs: int = 10, **options) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, **options)


@torch.no_grad()
def test_few_rows_read_rounded_weights_and_many_rows_the_weights_themselves():
    layer = linear()
    weights = Int8Weights([layer])
    weights.refresh()
    x_ND = torch.randn(FEW_INT8_ROWS + 1, 24)
    with replaced_forwards(weights.forwards()):
        few, many = layer(x_ND[None, :FEW_INT8_ROWS]), layer(x_ND)
    right = F.linear(x_ND, rounded(layer.weight), layer.bias)
    torch.testing.assert_close(few[0], right[:FEW_INT8_ROWS])
    assert (few[0] - layer(x_ND[:FEW_INT8_ROWS])).abs().max() > 1e-4
    assert torch.equal(many, layer(x_ND))


@torch.no_grad()
def test_a_changed_weight_is_copied_again_to_the_same_place():
    first, second = linear(), linear(bias=False)
    second.weight[3] = 0
    weights = Int8Weights([first, second])
    weights.refresh()
    x_ND = torch.randn(2, 24)
    before = [one.pairs_FP for one in weights.of(x_ND, [first, second])]
    kept = before[0].clone()
    second.weight.add_(1)
    weights.refresh()
    after = [one.pairs_FP for one in weights.of(x_ND, [first, second])]
    assert [one.data_ptr() for one in before] == [one.data_ptr() for one in after]
    assert torch.equal(after[0], kept)
    with replaced_forwards(weights.forwards()):
        torch.testing.assert_close(second(x_ND), F.linear(x_ND, rounded(second.weight)))
    assert weights.bytes() == 2 * (24 * 10 + 10 * 4)
    weights.release()
    assert weights.bytes() == 0


@torch.no_grad()
def test_outputs_without_weights_stay_zero():
    layer = linear(bias=False)
    layer.weight[3] = 0
    weights = Int8Weights([layer])
    weights.refresh()
    with replaced_forwards(weights.forwards()):
        assert torch.equal(layer(torch.randn(2, 24))[:, 3], torch.zeros(2))


@torch.no_grad()
def test_adapters_are_not_rounded():
    plain = linear()
    model = get_peft_model(nn.Sequential(copy.deepcopy(plain)), LoraConfig(target_modules=["0"], r=4))
    layer = model.base_model.model[0]
    nn.init.normal_(layer.lora_B["default"].weight)
    weights = Int8Weights([layer])
    weights.refresh()
    x_ND = torch.randn(3, 24)
    with replaced_forwards(weights.forwards()):
        found = layer(x_ND)
    term = layer.scaling["default"] * layer.lora_B["default"](layer.lora_A["default"](x_ND))
    torch.testing.assert_close(found, F.linear(x_ND, rounded(plain.weight), plain.bias) + term)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
@pytest.mark.parametrize("depth", [96, 576, 1536, 8960])
def test_kernels_read_integers(rows: int, depth: int):
    from upweight.models.kernels.gated import gated_linears
    from upweight.models.kernels.linear import linears

    layers = [linear(depth, width).to("cuda", torch.bfloat16) for width in (1536, 256, 256)]
    weights = Int8Weights(layers)
    weights.refresh()
    x_ND, residual_NF = torch.randn(rows, depth, device="cuda").bfloat16(), torch.randn(rows, 1536, device="cuda")
    copies = weights.of(x_ND, layers)
    pairs, scales = [one.pairs_FP for one in copies], [one.scale_F for one in copies]
    biases = [layer.bias for layer in layers]
    right = [F.linear(x_ND.float(), integers(p) * s[:, None]) for p, s in zip(pairs, scales, strict=True)]
    biased = [one + bias.float() for one, bias in zip(right, biases, strict=True)]
    close = {"atol": 2e-2, "rtol": 2e-2}
    out = linears(x_ND, pairs, biases, [], [], [], scales=scales).out_NF
    torch.testing.assert_close(out.float(), torch.cat(biased, -1), **close)
    residual_NF = residual_NF.bfloat16()
    out, squares_TN, _ = linears(x_ND, pairs[:1], [], [], [], [], residual_NF=residual_NF, scales=scales[:1])
    torch.testing.assert_close(out.float(), right[0] + residual_NF.float(), **close)
    torch.testing.assert_close(squares_TN.sum(0), out.float().pow(2).sum(1), rtol=1e-3, atol=1e-3)
    downs = [torch.randn(8, depth, device="cuda").bfloat16() / depth**0.5 for _ in range(2)]
    ups = [torch.randn(256, 8, device="cuda").bfloat16() / 8**0.5 for _ in range(2)]
    out = gated_linears(x_ND, pairs[1:], downs, ups, [0.5, 0.5], scales=scales[1:])
    terms = [0.5 * x_ND.float() @ d.float().t() @ u.float().t() for d, u in zip(downs, ups, strict=True)]
    torch.testing.assert_close(out.float(), F.silu(right[1] + terms[0]) * (right[2] + terms[1]), **close)
