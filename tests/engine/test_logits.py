from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_models import tiny
from upweight.engine import head as engine_head
from upweight.engine.head import linear_statistics, module_statistics, run_head
from upweight.engine.logits import (
    STATISTICS,
    HeadRequest,
    LogitTransform,
    logit_transform,
    token_gradient,
    token_statistics,
)
from upweight.models.modules import backbone_of, wrap_forward

REQUEST = HeadRequest(LogitTransform(scale=0.5, cap=4.0), 0.8, frozenset(STATISTICS))
NAMES = ("logps_T", *STATISTICS[:4])


@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        ("llama", LogitTransform()),
        ("qwen3_moe", LogitTransform()),
        ("gemma2", LogitTransform(cap=6.0)),
        ("granite", LogitTransform(scale=1 / 3)),
        ("cohere", LogitTransform(scale=0.25)),
        ("llama4_text", LogitTransform()),
        ("modernbert-decoder", None),
    ],
)
def test_the_form_of_the_logits_is_found_without_weights(kind, transform):
    with torch.device("meta"):
        model = tiny(kind)
    assert logit_transform(model, backbone_of(model)) == transform
    assert "forward" not in model.get_output_embeddings().__dict__
    assert "forward" not in backbone_of(model).__dict__


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(scale=0.3), LogitTransform(cap=2.0), LogitTransform(1.7, 3.0)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("reached", [("logps_T",), ("logps_T", "entropy_T"), ("logps_T", *STATISTICS[:4])])
def test_written_gradients_are_those_of_autograd(transform, temperature, reached):
    torch.manual_seed(0)
    projected = (3 * torch.randn(6, 11, dtype=torch.float32)).requires_grad_()
    target = torch.randint(0, 11, (6,))
    request = HeadRequest(transform, temperature, frozenset(STATISTICS))
    statistics = token_statistics(projected, target, request)
    grads = {name: torch.randn(6) for name in reached}
    (right,) = torch.autograd.grad([statistics[name] for name in reached], projected, list(grads.values()))
    ours = token_gradient(projected.detach(), target, request, {n: v.detach() for n, v in statistics.items()}, grads)
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_statistics_are_what_their_names_say():
    projected = torch.tensor([[1.0, 3.0, -1.0], [0.0, 0.0, 0.0]])
    target = torch.tensor([1, 2])
    out = token_statistics(projected, target, HeadRequest(LogitTransform(), 2.0, frozenset(STATISTICS)))
    p = (projected / 2).softmax(-1)
    torch.testing.assert_close(out["logps_T"], p[[0, 1], target].log())
    torch.testing.assert_close(out["entropy_T"], -(p * p.log()).sum(-1))
    torch.testing.assert_close(out["log_sum_exp_T"], (projected / 2).exp().sum(-1).log())
    torch.testing.assert_close(out["mean_logit_T"], projected.mean(-1) / 2)
    torch.testing.assert_close(out["log_collision_T"], (p * p).sum(-1).log())
    assert out["is_top_T"].tolist() == [True, False]


def made(bias=True, tokens=23, width=8, vocabulary=50, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    layer = nn.Linear(width, vocabulary, bias=bias, dtype=dtype)
    return hidden, layer, torch.randint(0, vocabulary, (tokens,))


def pulled(out, leaves):
    """Gradients of a weighted sum of everything differentiable."""
    generator = torch.Generator().manual_seed(1)
    loss = sum((out[name] * torch.randn(out[name].shape, generator=generator)).sum() for name in NAMES)
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(("chunk", "kept"), [(1 << 24, 1 << 26), (50 * 7, 0), (50 * 7, 50 * 14), (1, 50)])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_change_nothing(monkeypatch, chunk, kept, bias):
    monkeypatch.setattr(engine_head, "_CHUNK_ON_CPU", chunk)
    monkeypatch.setattr(engine_head, "_KEPT_ON_CPU", kept)
    hidden, layer, target = made(bias)
    leaves = [hidden, *layer.parameters()]
    plain = token_statistics(layer(hidden), target, REQUEST)
    right = pulled(plain, leaves)
    for ours in (
        linear_statistics(hidden, layer.weight, layer.bias, target, REQUEST),
        module_statistics(layer, 50, hidden, target, REQUEST),
    ):
        for name in ours:
            torch.testing.assert_close(ours[name], plain[name], atol=1e-5, rtol=1e-5)
        for a, b in zip(pulled(ours, leaves), right, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


class _LargestLogits(TorchDispatchMode):
    """Notes the most rows of logits that exist in one tensor."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.rows = max(self.rows, len(out))
        return out


@pytest.mark.parametrize("most", [None, 3])
def test_logits_of_no_more_tokens_exist_than_were_asked_for(most):
    hidden, layer, target = made()
    with _LargestLogits() as seen, torch.no_grad():
        linear_statistics(hidden, layer.weight, layer.bias, target, replace(REQUEST, chunk_tokens=most))
    assert seen.rows == (most or len(hidden))


def test_a_frozen_head_passes_gradients_on_and_keeps_none():
    hidden, layer, target = made()
    right = torch.autograd.grad(token_statistics(layer(hidden), target, REQUEST)["logps_T"].sum(), hidden)
    layer.requires_grad_(False)
    out = linear_statistics(hidden, layer.weight, layer.bias, target, REQUEST)
    out["logps_T"].sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    torch.testing.assert_close(hidden.grad, right[0], atol=1e-5, rtol=1e-5)


def test_only_the_entropy_may_be_used():
    hidden, layer, target = made()
    right = torch.autograd.grad(
        token_statistics(layer(hidden), target, REQUEST)["entropy_T"].sum(), [hidden, layer.weight]
    )
    out = linear_statistics(hidden, layer.weight, layer.bias, target, REQUEST)
    found = torch.autograd.grad(out["entropy_T"].sum(), [hidden, layer.weight])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_no_scored_tokens_make_empty_outputs_that_still_have_a_gradient():
    hidden, layer, target = made()
    out = linear_statistics(hidden[:0], layer.weight, layer.bias, target[:0], REQUEST)
    assert all(len(value) == 0 for value in out.values())
    out["logps_T"].sum().backward()
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("mixed", [True, False])
def test_half_precision_has_float32_statistics(mixed):
    hidden, layer, target = made(dtype=torch.float32 if mixed else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        out = linear_statistics(hidden, layer.weight, layer.bias, target, REQUEST)
        plain = token_statistics(layer(hidden), target, REQUEST)
    assert all(out[name].dtype == torch.float32 for name in NAMES)
    for name in NAMES:
        torch.testing.assert_close(out[name], plain[name], atol=1e-5, rtol=1e-5)
    for a, b in zip(pulled(out, [hidden, layer.weight]), pulled(plain, [hidden, layer.weight]), strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) < 0.02 * float(b.abs().max())


def test_memory_kept_for_backward_does_not_grow_with_vocabulary_times_tokens(monkeypatch):
    monkeypatch.setattr(engine_head, "_CHUNK_ON_CPU", 3000 * 20)
    monkeypatch.setattr(engine_head, "_KEPT_ON_CPU", 3000 * 50)
    for tokens in (100, 400):
        hidden, layer, target = made(tokens=tokens, vocabulary=3000)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            out = linear_statistics(hidden, layer.weight, layer.bias, target, REQUEST)
        assert sum(x.numel() for x in saved) < layer.weight.numel() + layer.bias.numel() + tokens * 20
        assert sum(x.numel() for x, _ in out["logps_T"].grad_fn.projected) == 3000 * 40
    with torch.no_grad():
        assert linear_statistics(hidden, layer.weight, layer.bias, target, REQUEST)["logps_T"].grad_fn is None


def test_a_taught_head_is_the_old_one_without_an_ask():
    hidden, layer, target = made()
    plain = layer(hidden)
    wrap_forward(layer, run_head)
    wrap_forward(layer, run_head)
    assert torch.equal(layer(hidden), plain)
    out = layer(hidden, target=target, request=REQUEST, vocabulary=50)
    torch.testing.assert_close(
        out["logps_T"], token_statistics(plain, target, REQUEST)["logps_T"], atol=1e-5, rtol=1e-5
    )


def test_other_numbers_of_rows_are_not_compiled_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(token_statistics, dynamic=True, fullgraph=True, backend="eager")
    for tokens in (128, 256, 384, 128):
        hidden, layer, target = made(tokens=tokens)
        with torch.no_grad():
            compiled(layer(hidden), target, REQUEST)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_gpu_statistics_and_gradients():
    hidden, layer, target = made(tokens=301, width=64, vocabulary=5003)
    right = token_statistics(layer(hidden), target, REQUEST)
    slopes = pulled(right, [hidden, layer.weight, layer.bias])
    there = layer.cuda()
    hidden_there = hidden.detach().cuda().requires_grad_()
    out = linear_statistics(hidden_there, there.weight, there.bias, target.cuda(), REQUEST)
    out = {name: value.cpu() for name, value in out.items()}
    for name in NAMES:
        torch.testing.assert_close(out[name], right[name], atol=1e-3, rtol=1e-3)
    for a, b in zip(pulled(out, [hidden_there, there.weight, there.bias]), slopes, strict=True):
        assert float((a.cpu() - b).abs().max()) < 1e-3 * float(b.abs().max())


@pytest.mark.gpu
def test_gpu_memory_grows_with_the_tokens_only_where_much_is_free(monkeypatch):
    monkeypatch.setattr(engine_head, "free_memory", lambda device: 0)
    layer = nn.Linear(64, 150_000, bias=False, device="cuda", dtype=torch.bfloat16)

    def peak(tokens):
        hidden = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.randint(0, 150_000, (tokens,), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_statistics(hidden, layer.weight, None, target, HeadRequest(LogitTransform()))["logps_T"].sum().backward()
        layer.weight.grad = None
        return torch.cuda.max_memory_allocated() - before

    peak(2048)
    few, many = peak(2048), peak(16384)
    logits = 16384 * 150_000 * 2
    assert many < few + logits / 20
    assert many < logits / 2
    monkeypatch.setattr(engine_head, "free_memory", lambda device: 1 << 50)
    assert peak(16384) > logits  # nothing is projected again
