import pytest
import torch
from torch import nn

from upweight.engine import head as engine_head
from upweight.engine.divergences import COMPARED, LISTED, OF_TEACHER, TeacherList, TeacherStates, top_k
from upweight.engine.head import linear_statistics, module_statistics
from upweight.engine.logits import (
    HeadRequest,
    LogitTransform,
    token_gradient,
    token_statistics,
)
from upweight.types import Divergence

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]
STUDENT, TEACHER = LogitTransform(0.7, 9.0), LogitTransform(1.3, None)


def made(tokens=23, width=8, teacher_width=5, vocabulary=60, teacher_vocabulary=60):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    head, teacher_head = nn.Linear(width, vocabulary), nn.Linear(teacher_width, teacher_vocabulary)
    with torch.no_grad():
        for layer in (head, teacher_head):
            layer.weight.mul_(4)
    states = TeacherStates(torch.randn(tokens, teacher_width), teacher_head, TEACHER, teacher_vocabulary)
    return hidden, head, torch.randint(0, min(vocabulary, teacher_vocabulary), (tokens,)), states


def exact(hidden, head, states, temperature, columns):
    """Log-probs of both models over the shared vocabulary in float64, from whole logits."""
    z = hidden.double() @ head.weight.double().T + head.bias.double()
    teacher = states.project
    v = states.hidden_TE.double() @ teacher.weight.double().T + teacher.bias.double()
    z, v = STUDENT(z)[:, :columns] / temperature, TEACHER(v)[:, :columns] / temperature
    return z.log_softmax(-1), v.log_softmax(-1).detach()


def whole(log_q, log_p, kind, beta):
    """The divergence as its definition has it."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def statistics(path, hidden, head, *, target, request, teacher, columns):
    if path == "linear":
        return linear_statistics(hidden, head.weight[:columns], head.bias[:columns], target, request, teacher=teacher)
    return module_statistics(
        lambda states: head(states)[:, :columns], columns, hidden, target, request, teacher=teacher
    )


@pytest.mark.parametrize("path", ["linear", "module"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("columns", [60, 53])
@pytest.mark.parametrize("kind_and_beta", KINDS)
def test_value_and_gradient_are_those_of_whole_distributions(path, kind_and_beta, temperature, columns, monkeypatch):
    kind, beta = kind_and_beta
    monkeypatch.setattr(engine_head, "_CHUNK_ON_CPU", 60 * 2 * 7)  # several chunks
    monkeypatch.setattr(engine_head, "_KEPT_ON_CPU", 60 * 2 * 7)  # of which one is kept
    hidden, head, target, states = made(teacher_vocabulary=columns)
    how = Divergence(kind, beta, temperature)
    # log-probs at another temperature, as those of a cross-entropy beside the divergence
    request = HeadRequest(STUDENT, 0.8, frozenset({*COMPARED, "entropy_T"}), how, TEACHER)
    out = statistics(path, hidden, head, target=target, request=request, teacher=states, columns=columns)
    log_q, log_p = exact(hidden, head, states, temperature, columns)
    value = whole(log_q, log_p, kind, beta)
    torch.testing.assert_close(out["divergence_T"].double(), value, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["forward_kl_T"].double(), whole(log_q, log_p, "forward_kl", 0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["reverse_kl_T"].double(), whole(log_q, log_p, "reverse_kl", 0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["teacher_entropy_T"].double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(out["agrees_T"], log_q.argmax(-1) == log_p.argmax(-1))
    known = log_p.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(out["teacher_logps_T"].double(), known, atol=1e-5, rtol=1e-5)
    logps = exact(hidden, head, states, 0.8, columns)[0].gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(out["logps_T"].double(), logps, atol=1e-5, rtol=1e-5)
    weights = torch.randn(len(target))
    leaves = [hidden, head.weight, head.bias]
    ours = torch.autograd.grad((out["divergence_T"] * weights - 0.3 * out["logps_T"]).sum(), leaves)
    right = torch.autograd.grad((value * weights - 0.3 * logps).sum(), leaves)
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind_and_beta", KINDS)
def test_the_gradient_of_a_sum_is_taken_in_the_forward(kind_and_beta, monkeypatch):
    monkeypatch.setattr(engine_head, "_CHUNK_ON_CPU", 60 * 2 * 7)
    hidden, head, target, states = made()
    projections = []
    teacher = TeacherStates(states.hidden_TE, lambda x: projections.append(len(x)) or states.project(x), TEACHER, 60)
    how = Divergence(*kind_and_beta, 1.5, summed=True)
    request = HeadRequest(STUDENT, 1.5, frozenset({*COMPARED, "entropy_T"}), how, TEACHER)
    out = linear_statistics(hidden, head.weight, head.bias, target, request, teacher=teacher)
    value, leaves = whole(*exact(hidden, head, states, 1.5, 60), *kind_and_beta), [hidden, head.weight, head.bias]
    logps = exact(hidden, head, states, 1.5, 60)[0].gather(1, target[:, None])[:, 0]
    ours = torch.autograd.grad(0.7 * out["divergence_T"].sum(), leaves, retain_graph=True)
    assert projections == [7, 7, 7, 2]
    again = torch.autograd.grad(0.7 * out["divergence_T"].sum(), leaves, retain_graph=True)  # recomputed
    assert len(projections) == 8
    both = torch.autograd.grad(0.7 * out["divergence_T"].sum() - out["logps_T"].sum(), leaves)
    right = torch.autograd.grad(0.7 * value.sum(), leaves, retain_graph=True)
    right_both = torch.autograd.grad(0.7 * value.sum() - logps.sum(), leaves)
    for taken, wanted in ((ours, right), (again, right), (both, right_both)):
        for one, other in zip(taken, wanted, strict=True):
            torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", ["linear", "module"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_listed_tokens_have_the_log_probs_and_gradients_of_the_whole_distribution(path, temperature, monkeypatch):
    monkeypatch.setattr(engine_head, "_CHUNK_ON_CPU", 60 * 2 * 7)
    hidden, head, target, states = made()
    best = top_k(states, 4, temperature, 5)
    log_q, log_p = exact(hidden, head, states, temperature, 60)
    log_p1 = exact(hidden, head, states, 1.0, 60)[0]
    assert torch.equal(best.ids_TK, log_p.topk(4).indices)
    torch.testing.assert_close(best.logps_TK.double(), log_p.topk(4).values, atol=1e-5, rtol=1e-5)
    ids_TK = best.ids_TK.clone()
    ids_TK[3, 2:] = -1
    ids_TK[5] = -1
    listed = torch.zeros_like(log_q, dtype=torch.bool)
    for row, ids in enumerate(ids_TK):
        listed[row, ids[ids >= 0]] = True
    torch.testing.assert_close(
        best.tail_T.double()[6:], log_p.masked_fill(listed, -torch.inf).logsumexp(-1)[6:], atol=1e-5, rtol=1e-5
    )
    request = HeadRequest(STUDENT, 1.0, frozenset(LISTED), Divergence(temperature=temperature))
    out = statistics(path, hidden, head, target=target, request=request, teacher=TeacherList(ids_TK), columns=60)
    values = torch.where(ids_TK >= 0, log_q.gather(1, ids_TK.clamp(min=0)), 0.0)
    tail = log_q.masked_fill(listed, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(out["listed_logps_TK"].double(), values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["listed_tail_T"].double(), tail, atol=1e-5, rtol=1e-5)
    assert torch.equal(out["agrees_T"], log_q.argmax(-1) == ids_TK[:, 0])
    weights, more = torch.randn_like(best.logps_TK), torch.randn(len(target))
    leaves = [hidden, head.weight, head.bias]
    ours = (out["listed_logps_TK"] * weights).sum() + (out["listed_tail_T"] * more).sum() + out["logps_T"].sum()
    right = (values * weights).sum() + (tail * more).sum() + log_p1.gather(1, target[:, None]).sum()
    for one, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(right, leaves), strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("teacher", ["states", "list"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_kernels_are_one_graph(teacher, kind):
    hidden, head, target, states = made()
    transform = TEACHER if teacher == "states" else None
    names = frozenset(COMPARED if teacher == "states" else LISTED)
    request = HeadRequest(STUDENT, 0.8, names, Divergence(kind, 0.4, 1.3), transform)
    given = states.values(60) if teacher == "states" else top_k(states, 4, 1.3, 50).ids_TK
    projected = head(hidden).detach()
    known = token_statistics(projected, target, request, given)
    grads = {name: torch.ones_like(known[name]) for name in sorted(OF_TEACHER) if name in known}
    options = {"backend": "eager", "dynamic": True, "fullgraph": True}
    again = torch.compile(token_statistics, **options)(projected, target, request, given)
    for name, value in known.items():
        torch.testing.assert_close(again[name], value, atol=1e-5, rtol=1e-5)
    right = token_gradient(projected, target, request, known, grads, teacher=given)
    ours = torch.compile(token_gradient, **options)(projected, target, request, known, grads, teacher=given)
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_a_row_without_a_scored_token_has_an_empty_list():
    best = top_k(made()[3].rows(slice(0, 0)), 4, 1.0, 5)
    assert best.ids_TK.shape == (0, 4)
    assert best.tail_T.shape == (0,)
