from dataclasses import replace

import pytest
import torch
from torch import nn

from upweight.engine import head as engine_head
from upweight.engine.divergences import COMPARED, OF_TEACHER, OUTSIDE, LogitTransform, TeacherStates
from upweight.engine.head import linear_statistics, module_statistics
from upweight.engine.logits import HeadRequest, token_gradient, token_statistics
from upweight.engine.outcomes import Matched
from upweight.types import Divergence

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3)]
STUDENT, TEACHER = LogitTransform(0.7, 9.0), LogitTransform(1.3, None)
NAMES = frozenset({*COMPARED, *OUTSIDE, "entropy_T"})
SHARED = torch.tensor([4, 0, 31, 17, 9, 22]), torch.tensor([1, 40, 3, 11, 30, 8])  # of 33 and of 47 tokens


def made(shared=SHARED, sizes=(33, 47), temperature=1.0, tokens=23):
    torch.manual_seed(0)
    hidden, head, other = torch.randn(tokens, 8, requires_grad=True), nn.Linear(8, sizes[0]), nn.Linear(5, sizes[1])
    with torch.no_grad():
        for layer in (head, other):
            layer.weight.mul_(4)
    matched = Matched.of(*shared, sizes, temperature)
    states = TeacherStates(torch.randn(tokens, 5), other, TEACHER, sizes[1], matched)
    return hidden, head, torch.randint(0, sizes[0], (tokens,)), states


def outcomes(logits, shared, temperature, bucket):
    """Log-probs of the shared tokens and of all others together, from their definition."""
    log_q = (logits / temperature).log_softmax(-1)
    kept, others = log_q[:, shared], torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, shared, False)
    rest = log_q[:, others].exp().sum(-1, keepdim=True)
    return (torch.cat([kept, rest.log()], -1) if bucket else kept.log_softmax(-1)), rest[:, 0]


def exact(hidden, head, states, shared, temperature, *, bucket=True):
    z = STUDENT(hidden.double() @ head.weight.double().T + head.bias.double())
    v = TEACHER(states.hidden_TE.double() @ states.project.weight.double().T + states.project.bias.double())
    (log_q, q_rest), (log_p, p_rest) = (
        outcomes(x, ids, temperature, bucket) for x, ids in zip((z, v), shared, strict=True)
    )
    return log_q, log_p.detach(), q_rest.detach(), p_rest.detach(), z


def whole(log_q, log_p, kind, beta):
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def run(path, hidden, head, *, target, request, teacher):
    if path == "linear":
        return linear_statistics(hidden, head.weight, head.bias, target, request, teacher=teacher)
    return module_statistics(head, head.out_features, hidden, target, request, teacher=teacher)


@pytest.mark.parametrize("path", ["linear", "summed", "module"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind_and_beta", KINDS)
def test_value_and_gradient_are_those_of_the_outcomes_of_both(path, kind_and_beta, temperature, monkeypatch):
    monkeypatch.setattr(engine_head, "_CHUNK_ON_CPU", 92 * 7)  # several chunks
    monkeypatch.setattr(engine_head, "_KEPT_ON_CPU", 40 * 7)  # of which one is kept
    hidden, head, target, states = made(temperature=temperature)
    how = Divergence(*kind_and_beta, temperature, summed=path == "summed")
    request = HeadRequest(STUDENT, 0.8, NAMES, how, LogitTransform())
    out = run("linear" if path == "summed" else path, hidden, head, target=target, request=request, teacher=states)
    log_q, log_p, q_rest, p_rest, z = exact(hidden, head, states, SHARED, temperature)
    value = whole(log_q, log_p, *kind_and_beta)
    right = {
        "divergence_T": value, "other_mass_T": q_rest, "teacher_other_mass_T": p_rest,
        "forward_kl_T": whole(log_q, log_p, "forward_kl", 0), "reverse_kl_T": whole(log_q, log_p, "reverse_kl", 0),
        "teacher_entropy_T": -(log_p.exp() * log_p).sum(-1),
        "logps_T": (z / 0.8).log_softmax(-1).gather(1, target[:, None])[:, 0],
    }  # fmt: skip
    for name, wanted in right.items():
        torch.testing.assert_close(out[name].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(out["agrees_T"], log_q.argmax(-1) == log_p.argmax(-1))
    leaves = [hidden, head.weight, head.bias]
    weights = torch.ones(len(target)) if path == "summed" else torch.randn(len(target))
    ours = (out["divergence_T"] * weights).sum() * 0.7
    wanted = (value * weights).sum() * 0.7
    if path != "summed":
        ours, wanted = ours - 0.3 * out["logps_T"].sum(), wanted - 0.3 * right["logps_T"].sum()
    for one, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(wanted, leaves), strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind_and_beta", KINDS)
def test_a_side_without_other_tokens_leaves_the_shared_ones(kind_and_beta):
    shared = torch.arange(6), torch.tensor([5, 3, 0, 1, 2, 4])  # the teacher has no other token
    hidden, head, target, states = made(shared, sizes=(33, 6))
    how = Divergence(*kind_and_beta)
    request = HeadRequest(STUDENT, 1.0, NAMES, how, LogitTransform())
    out = linear_statistics(hidden, head.weight, head.bias, target, request, teacher=states)
    log_q, log_p, *_ = exact(hidden, head, states, shared, 1.0, bucket=False)
    value = whole(log_q, log_p, *kind_and_beta)
    torch.testing.assert_close(out["divergence_T"].double(), value, atol=1e-5, rtol=1e-5)
    rest = exact(hidden, head, states, shared, 1.0)[2]
    torch.testing.assert_close(out["other_mass_T"].double(), rest, atol=1e-5, rtol=1e-5)
    assert not out["teacher_other_mass_T"].any()
    leaves = [hidden, head.weight, head.bias]
    ours, right = (torch.autograd.grad(x.sum(), leaves) for x in (out["divergence_T"], value))
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind_and_beta", KINDS)
def test_equal_vocabularies_give_the_divergence_of_whole_distributions(kind_and_beta):
    shared = torch.arange(33), torch.arange(33)
    hidden, head, target, states = made(shared, sizes=(33, 33))
    how = Divergence(*kind_and_beta)
    outs = []
    for teacher, transform in ((states, LogitTransform()), (replace(states, matched=None), TEACHER)):
        request = HeadRequest(STUDENT, 1.0, frozenset({*COMPARED, "entropy_T"}), how, transform)
        out = linear_statistics(hidden, head.weight, head.bias, target, request, teacher=teacher)
        outs.append((out, torch.autograd.grad(out["divergence_T"].sum(), [hidden, head.weight, head.bias])))
    for name in COMPARED:
        assert torch.equal(outs[0][0][name], outs[1][0][name]), name
    for one, other in zip(outs[0][1], outs[1][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("sizes", [(33, 47), (33, 6)], ids=str)
def test_kernels_are_one_graph(kind, sizes):
    shared = SHARED if sizes[1] > 6 else (torch.arange(6), torch.arange(6))
    hidden, head, target, states = made(shared, sizes=sizes, temperature=1.3)
    request = HeadRequest(STUDENT, 0.8, NAMES, Divergence(kind, 0.4, 1.3), LogitTransform())
    projected, ours = head(hidden).detach(), states.matched.student
    known = token_statistics(projected, target, request, states.values(0), ours)
    grads = {name: torch.ones_like(known[name]) for name in sorted(OF_TEACHER) if name in known}
    torch.compiler.reset()  # how often one process compiles a function is limited
    options = {"backend": "eager", "dynamic": True, "fullgraph": True}
    again = torch.compile(token_statistics, **options)(projected, target, request, states.values(0), ours)
    for name, value in known.items():
        torch.testing.assert_close(again[name], value, atol=1e-5, rtol=1e-5)
    given = {"teacher": states.values(0), "outcomes": ours}
    right = token_gradient(projected, target, request, known, grads, **given)
    found = torch.compile(token_gradient, **options)(projected, target, request, known, grads, **given)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    torch.compiler.reset()
