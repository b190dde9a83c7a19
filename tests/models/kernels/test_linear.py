"""The kernels of the sampler's linear layers against the products apart, on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Layers = tuple[list[Tensor], list[Tensor], list[Tensor], list[float]]
SHAPES = [(1, 96, [40], 3), (5, 1536, [256], 16), (64, 1536, [1536], 16), (100, 8960, [96], 64), (128, 200, [8960], 8)]
SIBLINGS = [
    (64, 1536, [1536, 256, 256], 16),
    (3, 96, [40, 8], 0),
    (64, 1536, [1536, 256, 256], 0),
    (300, 1536, [1536, 256, 256], 16),
]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


def layers_of(depth: int, widths: list[int], rank: int) -> Layers:
    """Weights and adapters; no adapters at rank 0."""
    torch.manual_seed(0)
    weights = [drawn(width, depth) for width in widths]
    if not rank:
        return weights, [], [], []
    return weights, [drawn(rank, depth) for _ in widths], [drawn(width, rank) for width in widths], [2.0] * len(widths)


def right_of(x_ND: Tensor, number: int, layers: Layers, bias: Tensor | None = None) -> Tensor:
    weights, downs, ups, scalings = layers
    right = F.linear(x_ND.float(), weights[number].float(), None if bias is None else bias.float())
    if downs:
        right += scalings[number] * x_ND.float() @ downs[number].float().t() @ ups[number].float().t()
    return right


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "depth", "widths", "rank"), SHAPES + SIBLINGS)
def test_layers_with_their_adapters_in_one_kernel(rows: int, depth: int, widths: list[int], rank: int, biased: bool):
    from upweight.models.kernels.linear import few_rows_linears

    layers = weights, downs, ups, scalings = layers_of(depth, widths, rank)
    x_ND = drawn(rows, depth)
    biases = [drawn(width) for width in widths] if biased else []
    right = torch.cat(
        [right_of(x_ND, number, layers, biases[number] if biased else None) for number in range(len(widths))], -1
    )
    first = few_rows_linears(x_ND, weights, biases, downs, ups, scalings)
    torch.testing.assert_close(first.float(), right, atol=2e-2, rtol=2e-2)
    again = (few_rows_linears(x_ND, weights, biases, downs, ups, scalings) for _ in range(20))
    assert all(torch.equal(first, one) for one in again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "depth", "width", "rank"), [(64, 1536, 8960, 16), (5, 96, 40, 0), (128, 576, 1536, 3)]
)
def test_gated_product_in_one_kernel(rows: int, depth: int, width: int, rank: int):
    from upweight.models.kernels.gated import few_rows_gated

    layers = weights, downs, ups, scalings = layers_of(depth, [width, width], rank)
    x_ND = drawn(rows, depth)
    right = F.silu(right_of(x_ND, 0, layers)) * right_of(x_ND, 1, layers)
    found = few_rows_gated(x_ND, weights, downs, ups, scalings)
    torch.testing.assert_close(found.float(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "depth", "width", "rank"), [(256, 1536, 8960, 16), (700, 96, 40, 3)])
def test_terms_of_both_adapters_are_added_before_the_gate(rows: int, depth: int, width: int, rank: int):
    from upweight.models.kernels.gated import gated_terms
    from upweight.models.kernels.linear import few_rows_linears

    layers = weights, downs, ups, scalings = layers_of(depth, [width, width], rank)
    x_ND = drawn(rows, depth)
    right = F.silu(right_of(x_ND, 0, layers)) * right_of(x_ND, 1, layers)
    narrow_NR = few_rows_linears(x_ND, downs, [], [], [], [])
    found = gated_terms(F.linear(x_ND, weights[0]), F.linear(x_ND, weights[1]), narrow_NR, ups, scalings)
    torch.testing.assert_close(found.float(), right, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "depth", "width", "rank"), [(64, 1536, 1536, 16), (5, 96, 40, 0), (200, 576, 576, 0)])
def test_a_norm_before_and_a_residual_after_need_no_launch(rows: int, depth: int, width: int, rank: int):
    from upweight.models.kernels.gated import gated_linears
    from upweight.models.kernels.linear import InputNorm, linears

    layers = weights, downs, ups, scalings = layers_of(depth, [width, width], rank)
    x_ND, residual_NF, weight_D = drawn(rows, depth) * 20, drawn(rows, width), drawn(depth) + 1
    next_F = drawn(width) + 1
    one = (weights[:1], [], downs[:1], ups[:1], scalings[:1])
    first, squares_TN, weighted_NF = linears(x_ND, *one, residual_NF=residual_NF, next_weight=next_F)
    torch.testing.assert_close(first.float(), right_of(x_ND, 0, layers) + residual_NF.float(), atol=5e-2, rtol=2e-2)
    torch.testing.assert_close(squares_TN.sum(0), first.float().pow(2).sum(1), rtol=1e-3, atol=1e-3)
    assert weighted_NF is not None
    torch.testing.assert_close(weighted_NF, (first.float() * next_F.float()).bfloat16())
    norm = InputNorm(1e-6, x_ND.float().pow(2).view(rows, -1, 4).sum(-1).t().contiguous())
    normed_ND = F.rms_norm(x_ND, (depth,), weight_D, 1e-6)
    found = linears(x_ND * weight_D, weights, [], downs, ups, scalings, norm=norm).out_NF
    right = torch.cat([right_of(normed_ND, number, layers) for number in (0, 1)], -1)
    torch.testing.assert_close(found.float(), right, atol=5e-2, rtol=2e-2)
    right = F.silu(right_of(normed_ND, 0, layers)) * right_of(normed_ND, 1, layers)
    found = gated_linears(x_ND * weight_D, weights, downs, ups, scalings, norm)
    torch.testing.assert_close(found.float(), right, atol=2e-1, rtol=3e-2)
