"""The experts of a layer for few tokens against their products one by one, on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from tiny_models import tiny
from upweight.engine import Engine
from upweight.models.kernels import grouped_experts
from upweight.models.kernels.grouped_experts import is_groupable

# Tokens, experts of a token, experts, widths of a token and of an expert.
SHAPES = [(1, 2, 4, 32, 16), (5, 2, 4, 64, 48), (70, 3, 8, 130, 72), (600, 4, 64, 128, 80), (64, 8, 128, 256, 96)]


def right_of(x_ND, index_NK, weight_NK, gate_up_XFD, down_XDI):
    out = torch.zeros_like(x_ND, dtype=torch.float32)
    for expert in range(len(gate_up_XFD)):
        token, place = (index_NK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_ND[token].float(), gate_up_XFD[expert].float()).chunk(2, -1)
        answer = F.linear(F.silu(gate) * up, down_XDI[expert].float())
        out.index_add_(0, token, answer * weight_NK[token, place, None].float())
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ["any", "few"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_over_the_experts_of_a_token(shape, chosen):
    from upweight.models.kernels.few_experts import few_experts

    tokens, top_k, experts, width, inner = shape
    torch.manual_seed(0)
    among = experts if chosen == "any" else top_k  # the others have no tokens
    index = torch.rand(tokens, among, device="cuda").topk(top_k).indices
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, top_k, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(experts, 2 * inner, width, device="cuda", dtype=torch.bfloat16) / width**0.5
    down = torch.randn(experts, width, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    found = few_experts(x, index, weights, gate_up, down)
    torch.testing.assert_close(found.float(), right_of(x, index, weights, gate_up, down), atol=3e-2, rtol=3e-2)
    assert all(torch.equal(found, few_experts(x, index, weights, gate_up, down)) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_compiled_layers_of_a_sampler_use_them(kind, monkeypatch):
    model = tiny(kind, num_hidden_layers=1).bfloat16().cuda().requires_grad_(False)
    Engine(model)
    experts = next(filter(is_groupable, model.modules()))
    x = torch.randn(6, 32, device="cuda", dtype=torch.bfloat16)
    index = torch.stack([torch.randperm(4, device="cuda")[:2] for _ in range(6)])
    weights = torch.rand(6, 2, device="cuda", dtype=torch.bfloat16)
    calls = []
    kernels = grouped_experts.few_experts
    assert kernels is not None
    takes = kernels.takes
    monkeypatch.setattr(kernels, "takes", lambda *sizes: calls.append(1) or takes(*sizes))
    with torch.no_grad():
        plain = experts(x, index, weights)
        compiled = torch.compile(experts.forward, dynamic=True)(x, index, weights)
    torch.testing.assert_close(compiled.float(), plain.float(), atol=3e-2, rtol=3e-2)
    assert bool(calls) == (kind != "gpt_oss")
