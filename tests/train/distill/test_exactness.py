"""Loss and gradient of a step against a direct computation in float64, however the step is cut and whoever runs it."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from made_runs import largest_difference, on_ranks, policy_for, trainer_for, weights_of
from tiny_models import drawn, tiny
from upweight.methods import Distill
from upweight.models.reference import SeparateModel
from upweight.train.distill.teachers import LocalTeacher, Teachers
from upweight.types import Sample, Unit

VOCABULARY = 89
RATE = 0.05


def teacher_model():
    model = tiny("qwen3", num_hidden_layers=1, hidden_size=16)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def taught_by_it(method):
    def load(policy, engine, attach_engine):
        model = teacher_model()
        return Teachers({None: LocalTeacher(method, SeparateModel(policy, model), attach_engine(model), VOCABULARY)})

    return {"load_teachers": load}


def made_units():
    """Completions of shared prompts under many masks: turns, single tokens, the first token, none at all."""
    units = []
    for number in range(9):
        prompt, rest = drawn(300 + number // 3, 4 + number // 3), drawn(400 + number, 3 + 2 * (number % 5))
        ids = np.concatenate([prompt, rest])
        mask = np.arange(len(ids)) >= len(prompt)
        if number % 3 == 1:
            mask &= np.arange(len(ids)) % 3 != 0  # what an environment said lies between turns
        if number == 4:
            mask[0] = True  # which nothing predicts
        if number == 6:
            mask[:] = False
        units.append(Unit((Sample(ids, mask),), number // 3))
    ids = drawn(500, 14)
    parts = [(ids[:9], np.arange(9) >= 6), (np.concatenate([ids[:5], drawn(501, 4)]), np.arange(9) == 7)]
    units.append(Unit(tuple(Sample(*part) for part in parts), 3))  # segments of one episode
    return units


class Direct:
    """Both models in float64, each sequence forwarded by itself: whole distributions at the scored tokens."""

    def __init__(self, units):
        self.student, teacher = policy_for(Distill()).double(), teacher_model().double()
        self.parts = []
        for sample in (sample for unit in units for sample in unit.samples):
            at = np.flatnonzero(sample.loss_mask)
            at, ids = torch.from_numpy(at[at > 0]), torch.from_numpy(sample.ids)
            if len(at):
                z, v = (
                    model(input_ids=ids[None], use_cache=False).logits[0, at - 1] for model in (self.student, teacher)
                )
                self.parts.append((z, v.detach(), ids[at]))

    def step(self, method):
        """Loss and gradients of a step."""
        total, ce = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for z, v, target in self.parts:
            log_q, log_p = ((x / method.temperature).log_softmax(-1) for x in (z, v))
            if method.top_k is not None:
                log_q, log_p = over_the_list(log_q, log_p, method)
            total = total + diverging(log_q, log_p, method)
            ce = ce - z.log_softmax(-1).gather(1, target[:, None]).sum()
        weight = method.coef * (method.temperature**2 if method.temperature_squared else 1)
        loss = (weight * total + method.ce_coef * ce) / sum(len(target) for *_, target in self.parts)
        named = dict(self.student.named_parameters())
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        return loss.item(), dict(zip(named, grads, strict=True))


def over_the_list(log_q, log_p, method):
    ids_TK = log_p.topk(min(method.top_k, VOCABULARY)).indices
    listed = torch.zeros_like(log_q, dtype=torch.bool).scatter(1, ids_TK, True)
    tails = [x.masked_fill(listed, -torch.inf).logsumexp(-1, keepdim=True) for x in (log_q, log_p)]
    log_q, log_p = log_q.gather(1, ids_TK), log_p.gather(1, ids_TK)
    if method.tail == "renormalise":
        return log_q.log_softmax(-1), log_p.log_softmax(-1)
    if method.tail == "bucket" and method.top_k < VOCABULARY:
        return torch.cat([log_q, tails[0]], -1), torch.cat([log_p, tails[1]], -1)
    return log_q, log_p


def diverging(log_q, log_p, method):
    p, q = log_p.exp(), log_q.exp()
    if method.kind == "forward_kl":
        return (p * (log_p - log_q)).sum()
    if method.kind == "reverse_kl":
        return (q * (log_q - log_p)).sum()
    log_m = (method.beta * p + (1 - method.beta) * q).log()
    return (method.beta * p * (log_p - log_m) + (1 - method.beta) * q * (log_q - log_m)).sum()


KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9), ("jsd", 0.0), ("jsd", 1.0)]
LISTS = [(None, "bucket"), (1, "bucket"), (1, "drop"), *product((6,), ("bucket", "renormalise", "drop")),
         (VOCABULARY, "bucket")]  # fmt: skip


def variants():
    for (kind, beta), temperature, (top_k, tail) in product(KINDS, (0.6, 1.0, 2.5), LISTS):
        settings = {"divergence": kind, "beta": beta, "temperature": temperature, "top_k": top_k, "tail": tail}
        yield Distill(on_policy=0, **settings)
    yield Distill(on_policy=0, temperature=2.0, temperature_squared=True, coef=0.7, ce_coef=0.4)
    yield Distill(on_policy=0, coef=0, ce_coef=1.0)


class Training:
    """A trainer whose steps may have any method."""

    def __init__(self, folder):
        self.trainer = trainer_for(Distill(on_policy=0), folder, batch=4, parts=taught_by_it(Distill(on_policy=0)))
        self.runner = self.trainer.runner

    def step(self, method, units, *, budget=40, layouts=("tree", "tree")):
        """Loss and gradients of a step as training computes them."""
        teacher = self.runner.teachers.by_name[None]
        self.runner.method = self.runner.packer.method = method
        self.runner.teachers, self.runner.token_budget = Teachers({None: replace(teacher, method=method)}), budget
        self.runner.engine.layout, teacher.engine.layout = layouts
        self.trainer.model.zero_grad()
        loss = self.runner.train(self.trainer.model, units).item()
        return loss, {name: weight.grad.clone() for name, weight in self.trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    return Training(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def direct():
    return Direct(made_units())


def assert_exact(found, right):
    """To 1e-5, of the largest number of a gradient where that is above 1."""
    assert found[0] == pytest.approx(right[0], abs=1e-5, rel=1e-5)
    scale = max(1.0, *(float(grad.abs().max()) for grad in right[1].values()))
    for name, grad in right[1].items():
        torch.testing.assert_close(
            found[1][name].double(), grad, atol=1e-5 * scale, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("top_k_and_tail", LISTS, ids=str)
def test_every_divergence_at_every_temperature_is_the_direct_computation(top_k_and_tail, training, direct):
    units = made_units()
    for method in variants():
        if (method.top_k, method.tail) == top_k_and_tail:
            assert_exact(training.step(method, units), direct.step(method))


ONE_OF_EACH = [
    Distill(on_policy=0, divergence="forward_kl", temperature=1.5),
    Distill(on_policy=0, divergence="reverse_kl", ce_coef=0.3),
    Distill(on_policy=0, divergence="jsd", beta=0.2, top_k=5),
    Distill(on_policy=0, divergence="reverse_kl", top_k=5, tail="renormalise", temperature=0.7),
    Distill(on_policy=0, divergence="forward_kl", top_k=5, tail="drop"),
]


@pytest.mark.parametrize("method", ONE_OF_EACH, ids=lambda method: f"{method.divergence} {method.top_k} {method.tail}")
@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(10)), budget=st.integers(14, 200))
def test_any_order_and_any_cut_give_the_same_step(method, training, direct, order, budget):
    units = [made_units()[index] for index in order]
    assert_exact(training.step(method, units, budget=budget), direct.step(method))


@pytest.mark.parametrize("layouts", [*product(("tree", "padded"), repeat=2)], ids=str)
@pytest.mark.parametrize("method", ONE_OF_EACH, ids=lambda method: f"{method.divergence} {method.top_k} {method.tail}")
def test_shared_beginnings_of_either_model_change_nothing(method, layouts, training, direct):
    assert_exact(training.step(method, made_units(), layouts=layouts), direct.step(method))


def on_two_ranks(folder):
    for number, method in enumerate(ONE_OF_EACH):
        trainer = trainer_for(method, folder, batch=4, budget=40, max_steps=1, parts=taught_by_it(method))
        before = weights_of(trainer)
        trainer.get_train_dataloader = lambda: [{"units": made_units()}]
        trainer.train()
        if trainer.is_world_process_zero():
            after = weights_of(trainer)
            grads = {name: (before[name] - after[name]) / RATE for name in before}
            torch.save((trainer.state.log_history[0]["loss"], grads), folder / f"{number}.pt")


@pytest.mark.slow
def test_two_ranks_take_the_direct_computations_step(direct, tmp_path):
    on_ranks(on_two_ranks, 2, tmp_path)
    for number, method in enumerate(ONE_OF_EACH):
        (loss, grads), (right, right_grads) = torch.load(tmp_path / f"{number}.pt"), direct.step(method)
        assert loss == pytest.approx(right, abs=2e-4)  # logs are rounded
        assert largest_difference({name: grad.double() for name, grad in grads.items()}, right_grads) < 1e-4
