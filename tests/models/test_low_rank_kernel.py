"""The fused adapter of the sampler against the products apart, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

SHAPES = [(1, 96, 40, 3), (5, 1536, 256, 16), (64, 1536, 1536, 16), (100, 8960, 96, 64), (128, 200, 8960, 8)]


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "depth", "width", "rank"), SHAPES)
def test_linear_with_adapter_in_one_kernel(rows: int, depth: int, width: int, rank: int, biased: bool):
    from upweight.models.low_rank_kernel import low_rank_linear

    torch.manual_seed(0)
    x_ND, weight, down, up = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
        for shape in ((rows, depth), (width, depth), (rank, depth), (width, rank))
    )
    bias = torch.randn(width, device="cuda", dtype=torch.bfloat16) if biased else None
    right = F.linear(x_ND.float(), weight.float(), None if bias is None else bias.float())
    right += 2 * x_ND.float() @ down.float().t() @ up.float().t()
    first = low_rank_linear(x_ND, weight, bias, down, up, 2.0)
    torch.testing.assert_close(first.float(), right, atol=2e-2, rtol=2e-2)
    assert all(torch.equal(first, low_rank_linear(x_ND, weight, bias, down, up, 2.0)) for _ in range(20))
