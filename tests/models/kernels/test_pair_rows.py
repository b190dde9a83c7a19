"""Rows of tokens to pairs of token and expert and back, against indexing, on a GPU."""

import pytest
import torch

from tiny_models import relative_difference, tiny
from upweight.models.kernels.grouped_experts import group_experts, is_groupable


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(5, 2, 40), (1, 8, 2048), (9, 3, 2100), (0, 2, 64)])
def test_rows_and_sums(tokens, top_k, columns, dtype):
    from upweight.models.kernels.pair_rows import spread_rows, sum_rows

    places = torch.randperm(tokens * top_k, device="cuda")
    tokens_ND = torch.randn(tokens, columns, device="cuda").to(dtype)
    pairs_SD = torch.randn(tokens * top_k, columns, device="cuda").to(dtype)
    spread = torch.empty_like(pairs_SD)
    spread[places] = tokens_ND.repeat_interleave(top_k, 0)
    assert torch.equal(spread_rows(tokens_ND, places, top_k), spread)
    right = pairs_SD.float()[places].view(tokens, top_k, columns).sum(1)
    torch.testing.assert_close(sum_rows(pairs_SD, places, top_k), right.to(dtype))


@pytest.mark.gpu
def test_experts_with_the_kernels_are_those_of_transformers():
    experts = next(filter(is_groupable, tiny("qwen3_moe", num_hidden_layers=1, hidden_size=128).modules())).to("cuda")
    hidden = torch.randn(70, 128, device="cuda", requires_grad=True)
    weights = torch.rand(70, 2, device="cuda", requires_grad=True)
    index = torch.stack([torch.randperm(4, device="cuda")[:2] for _ in range(70)])
    inputs = {"hidden": hidden, "weights": weights, **dict(experts.named_parameters())}

    def gradients():
        out = experts(hidden, index, weights)
        return dict(zip(inputs, torch.autograd.grad(out.pow(2).sum(), list(inputs.values())), strict=True))

    stock = gradients()
    group_experts(experts)
    assert relative_difference(gradients(), stock) < 1e-4
