import pytest
import torch

from tiny_models import tiny
from upweight.engine.forward import body_of
from upweight.engine.logits import (
    STATISTICS,
    HeadRequest,
    LogitTransform,
    logit_transform,
    row_gradient,
    row_statistics,
)


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
    assert logit_transform(model, body_of(model)) == transform
    assert "forward" not in model.get_output_embeddings().__dict__
    assert "forward" not in body_of(model).__dict__


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
    statistics = row_statistics(projected, target, request)
    grads = {name: torch.randn(6) for name in reached}
    (right,) = torch.autograd.grad([statistics[name] for name in reached], projected, list(grads.values()))
    ours = row_gradient(projected.detach(), target, request, {n: v.detach() for n, v in statistics.items()}, grads)
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_statistics_are_what_their_names_say():
    projected = torch.tensor([[1.0, 3.0, -1.0], [0.0, 0.0, 0.0]])
    target = torch.tensor([1, 2])
    out = row_statistics(projected, target, HeadRequest(LogitTransform(), 2.0, frozenset(STATISTICS)))
    p = (projected / 2).softmax(-1)
    torch.testing.assert_close(out["logps_T"], p[[0, 1], target].log())
    torch.testing.assert_close(out["entropy_T"], -(p * p.log()).sum(-1))
    torch.testing.assert_close(out["log_sum_exp_T"], (projected / 2).exp().sum(-1).log())
    torch.testing.assert_close(out["mean_logit_T"], projected.mean(-1) / 2)
    torch.testing.assert_close(out["log_collision_T"], (p * p).sum(-1).log())
    assert out["is_top_T"].tolist() == [True, False]
