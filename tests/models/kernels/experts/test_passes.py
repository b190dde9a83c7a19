"""The passes over rows of pairs as kernels, against torch's operators."""

import pytest
import torch

from tiny_models import gradients, relative_difference, tiny
from upweight.models.kernels.experts import grouped
from upweight.models.precision import set_up_precision

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def by_torch(monkeypatch, function, *tensors):
    with monkeypatch.context() as patch:
        patch.setattr(grouped, "passes", None)
        return function(*tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [24, 768, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_their_gradients(monkeypatch, dtype, width):
    both, grad = drawn(1003, 2 * width, dtype=dtype), drawn(1003, width, dtype=dtype, seed=1)
    weight = drawn(1003, dtype=dtype, seed=2).abs()
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    right = by_torch(monkeypatch, grouped._gate, both, weight)
    torch.testing.assert_close(grouped._gate(both, weight), right, **near)
    right = by_torch(monkeypatch, grouped._gate_gradients, grad, both, weight)
    for found, expected in zip(grouped._gate_gradients(grad, both, weight), right, strict=True):
        assert found.dtype == dtype
        difference = (found.float() - expected.float()).norm() / expected.float().norm()
        assert difference < (1e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_by_token(monkeypatch, dtype):
    rows, inverse = drawn(8 * 77, 2050, dtype=dtype), torch.randperm(8 * 77, device="cuda")
    right = by_torch(monkeypatch, grouped._sum_by_token, rows, inverse, 8)
    torch.testing.assert_close(grouped._sum_by_token(rows, inverse, 8), right, rtol=2e-2, atol=2e-2)
    nothing = grouped._sum_by_token(rows[:0], inverse[:0], 8)
    assert nothing.shape == (0, 2050)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [[0, 5, 0, 300, 1], [64, 64, 64, 64, 64]])
def test_gradients_of_weights_are_float32_sums_of_each_expert(sizes):
    from upweight.models.kernels.experts.passes import weight_gradient

    left, right = drawn(sum(sizes), 200, dtype=torch.bfloat16), drawn(sum(sizes), 136, dtype=torch.bfloat16, seed=1)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    found = weight_gradient(left, right, ends)
    assert found.dtype == torch.float32
    for expert, (a, b) in enumerate(zip(left.split(sizes), right.split(sizes), strict=True)):
        torch.testing.assert_close(found[expert], (a.double().t() @ b.double()).float(), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])  # weights with their outputs first, and with their inputs
def test_masters_get_the_gradients_of_their_copies(monkeypatch, kind):
    ids = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(2)).cuda()
    found = []
    for kernels in (True, False):
        model = tiny(kind, num_hidden_layers=2, hidden_size=64, intermediate_size=64).bfloat16().cuda()
        set_up_precision(model, torch.bfloat16)
        grouped.group_experts(model)
        with monkeypatch.context() as patch:
            if not kernels:
                patch.setattr(grouped, "passes", None)
            loss = model(input_ids=ids).logits.float().log_softmax(-1)[..., 5].sum()
            assert any("_CopiedProduct" in type(node).__name__ for node in nodes_of(loss)) is kernels
            found.append({name: one.float().cpu() for name, one in gradients(model, loss).items()})
    assert any("experts" in name for name in found[0])
    assert relative_difference(*found) < 0.05


def nodes_of(loss):
    seen, nodes = {loss.grad_fn}, [loss.grad_fn]
    while nodes:
        new = {before for before, _ in nodes.pop().next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return seen
