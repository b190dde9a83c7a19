"""The properties that training relies on, each tried on a method; what fails is said in words."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from upweight.doctor.method_check.advantages import advantages_are_sound, unknown_to_advantages
from upweight.doctor.method_check.numbers import KNOWN_OUTPUTS, LENGTHS, UNITS, NumberStep, Result, loss_of, summed
from upweight.doctor.method_check.on_model import ModelStep
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.methods.users.cut import untried_cuts
from upweight.methods.users.terms import padding
from upweight.user_modules import describe_error, line_of, line_of_error

TOLERANCE, MODEL_TOLERANCE = 1e-9, 2e-3
STEP = 1e-6  # of finite differences
AVERAGES = (
    "Something is divided by, averaged over or compared with what happens to be in the same micro-batch. Return the "
    "terms themselves; they are divided by the counts of the whole step"
)

PADDING = (
    "Padding is in it, whose width is that of the longest sequence in the micro-batch. Multiply by `mask` before a sum "
    "over tokens, and divide by `lengths`, not by the width"
)


@dataclass(frozen=True)
class Finding:
    """A property, and why the method lacks it; None if it has it, or if it could not be tried."""

    name: str
    problem: str | None
    untried: str | None = None  # why


def check(method: Method) -> list[Finding]:
    """Return every property with what is wrong; the first that cannot be tried at all ends it."""
    if unknown := sorted(method.statistics - KNOWN_OUTPUTS):
        return [Finding("outputs", f"it reads {', '.join(unknown)}, which this check cannot make up")]
    findings = []
    for name, tried in CHECKS.items():
        if name == "advantages" and (untried := unknown_to_advantages(method)) is not None:
            findings.append(Finding(name, None, untried))
            continue
        try:
            with untried_cuts():
                problem = next(tried(method), None)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # the user's code
            problem = f"it failed: {describe_error(error)}"
        findings.append(Finding(name, problem))
        if problem is not None and name == "runs":
            break
    return findings


def runs(method: Method) -> Iterator[str]:
    """The loss of a whole step is a finite number, counted by what it is summed by."""
    step = NumberStep(method)
    out, batch = step.part(range(UNITS))
    counts, loss = method.count(batch), method.loss(out, batch, step.prepared([(out, batch)]))
    if counts.keys() != loss.sums.keys():
        yield f"count() has {sorted(counts)}, and the loss is summed by {sorted(loss.sums)}: the names must be the same"
    for name, total in loss.sums.items():
        if total.ndim:
            yield f"the sum '{name}' has shape {list(total.shape)}; it must be one number"
    result = step.run([range(UNITS)])
    if not result.loss.isfinite():
        words = "a sequence may have no scored token: guard divisions, roots and logarithms"
        yield f"the loss is not finite, though all inputs are{line_of(method.loss)}; {words}"
    if not any(bool(one.any()) for one in result.gradients.values()):
        yield f"no gradient reaches the log-probs (or scores): is everything detached{line_of(method.loss)}?"
    if not all(bool(one.isfinite().all()) for one in result.gradients.values()):
        yield "the gradient is NaN or infinite, though the loss is finite: guard roots, logarithms and divisions"
    if problem := next(_compare(result, step.run([range(UNITS)]), "the same step again"), None):
        yield f"{problem}. Draw no random numbers, and keep nothing from one call for the next"


def any_order(method: Method) -> Iterator[str]:
    """The order of units in a batch does not matter."""
    step = NumberStep(method)
    whole = step.run([range(UNITS)])
    for seed in range(3):
        if problem := next(_compare(whole, step.run([_shuffled(seed)]), "the same units in another order"), None):
            yield f"{problem}. A sequence has no fixed place in a batch: do not use its number"


def any_cut(method: Method) -> Iterator[str]:
    """Cutting a step into micro-batches changes nothing."""
    step = NumberStep(method)
    whole = step.run([range(UNITS)])
    for seed in range(6):
        order, borders = _shuffled(seed), sorted({0, UNITS, *random.Random(seed).sample(range(1, UNITS), 1 + seed % 4)})
        cuts = [order[a:b] for a, b in pairwise(borders)]
        if problem := next(_compare(whole, step.run(cuts), f"a cut into {len(cuts)} micro-batches"), None):
            with padding(width=max(LENGTHS)):
                alike = next(_compare(step.run([range(UNITS)]), step.run(cuts), ""), None) is None
            yield f"{problem}. {PADDING if alike else AVERAGES}"


def masks(method: Method) -> Iterator[str]:
    """What stands in the padding, and how much of it there is, does not matter."""
    step = NumberStep(method)
    whole = step.run([range(UNITS)])
    for value, columns in ((0.0, 3), (1.7, 0), (-0.9, 2)):
        with padding(value, columns):
            result = step.run([range(UNITS)])
        if problem := next(_compare(whole, result, "other values in the padding, or more of it"), None):
            yield f"{problem}. {PADDING.partition('. ')[2]}"


def gradients(method: Method) -> Iterator[str]:
    """The gradient is that of the loss: finite differences agree, where detached parts count as constants."""
    for seed in (7, 8):
        step = NumberStep(method, seed)
        part = step.part(range(UNITS))
        prepared, recorded = step.prepared([part]), list[Tensor]()
        with _detached(recorded, replay=False):
            total = _total(method, step, prepared)
        gradients_of_leaves = torch.autograd.grad(total, list(step.leaves.values()), allow_unused=True)
        for (name, leaf), gradient in zip(step.leaves.items(), gradients_of_leaves, strict=True):
            direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed), dtype=leaf.dtype)
            expected = 0.0 if gradient is None else float((gradient * direction).sum())
            ends = []
            for sign in (1, -1):
                step.outputs[name] = (leaf + sign * STEP * direction).detach()
                with _detached(recorded, replay=True):
                    ends.append(_total(method, step, prepared).item())
            step.outputs[name] = leaf
            slope = (ends[0] - ends[1]) / (2 * STEP)
            if abs(slope - expected) > 1e-5 * max(1.0, abs(slope)):
                remedy = "Use .detach() for parts that are constants; no_grad, .data, .item() and numpy hide gradients"
                along = name.rpartition("_")[0]
                yield f"along {along} the loss changes by {slope:.4g}, its gradient says {expected:.4g}. {remedy}"


def no_waiting(method: Method) -> Iterator[str]:
    """The loss reads no value off the device, which would make it wait."""
    step = NumberStep(method)
    out, batch = step.part(range(UNITS))
    prepared = {name: value.to("meta") for name, value in step.prepared([(out, batch)]).items()}
    away = {name: value.to("meta") for name, value in vars(out).items() if isinstance(value, Tensor)}
    try:
        method.loss(type(out)(**away), batch.to("meta"), prepared)
    except Exception as error:  # on tensors without values
        if "meta" not in str(error).lower() and not isinstance(error, NotImplementedError):
            raise
        # What torch says of tensors without values is about torch: the place is what helps.
        lead = str(error).partition(" failed")[0] if isinstance(error, UserError) else method.name
        place = f"{lead}{line_of_error(error.__cause__ or error)}"
        remedy = (
            "Use torch.where instead of `if` and of boolean indexing; no .item(), .tolist(), .cpu(), bool(), float()"
        )
        yield f"the loss needs a value on the host, which waits for the GPU. {remedy}: {place}"


def on_a_model(method: Method) -> Iterator[str]:
    """Trees or padded rows, many rows or one, ranks and orders give the same gradients of a model."""
    step = ModelStep(method)
    loss, gradient = step.run("padded", 10**6)
    if not gradient.isfinite().all() or not gradient.any():
        yield "on a tiny model the gradient is zero or not finite"
    order = random.Random(0).sample(range(len(step.units)), len(step.units))
    cases: dict[str, dict[str, Any]] = {
        "shared prompts are computed once": {"layout": "tree", "budget": 10**6},
        "the step is many rows": {"layout": "tree", "budget": 40},
        "two ranks share the step": {"layout": "tree", "budget": 60, "ranks": 2},
        "rows come in another order": {"layout": "padded", "budget": 60, "order": order},
    }
    for words, options in cases.items():
        other, other_gradient = step.run(**options)
        scale = float(gradient.abs().max())
        if float((other_gradient - gradient).abs().max()) > MODEL_TOLERANCE * scale:
            yield f"the gradient of a tiny model is another one when {words}. {_cause(method)}"
        if abs(float(other - loss)) > MODEL_TOLERANCE * max(1.0, abs(float(loss))):
            losses = f"{float(other):.5g} instead of {float(loss):.5g}"
            yield f"the loss of a tiny model is {losses} when {words}. {_cause(method)}"


def _cause(method: Method) -> str:
    """Return why a model's step changes with its rows: what a cut of numbers shows, else the likeliest."""
    for name in ("any cut into micro-batches", "masks"):
        if next(CHECKS[name](method), None):
            return f"The cause is that of '{name}', above"
    return AVERAGES


def counts_add_up(method: Method) -> Iterator[str]:
    """The counts of parts add up to those of the whole, and do not depend on outputs."""
    step = NumberStep(method)
    whole = method.count(step.part(range(UNITS))[1])
    parts = summed(method.count(step.part([unit])[1]) for unit in range(UNITS))
    for name, total in whole.items():
        if not torch.isclose(total.double(), parts[name].double()):
            yield f"count() gives '{name}' as {float(total):g} for the whole and {float(parts[name]):g} for its parts"


CHECKS: dict[str, Callable[[Method], Iterator[str]]] = {
    "runs": runs,
    "counts add up": counts_add_up,
    "any order": any_order,
    "any cut into micro-batches": any_cut,
    "masks": masks,
    "gradients against finite differences": gradients,
    "no waiting for the device": no_waiting,
    "trees, rows and ranks of a model": on_a_model,
    "advantages": advantages_are_sound,
}


def _total(method: Method, step: NumberStep, prepared: dict[str, Tensor]) -> Tensor:
    out, batch = step.part(range(UNITS))
    return loss_of(method.loss(out, batch, prepared).sums, method.count(batch))


def _shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(UNITS), UNITS)


def _compare(whole: Result, other: Result, words: str) -> Iterator[str]:
    """Yield how a step differs from the same step otherwise arranged."""
    if not torch.isclose(whole.loss, other.loss, rtol=TOLERANCE, atol=TOLERANCE):
        digits = 6 if f"{float(whole.loss):.6g}" != f"{float(other.loss):.6g}" else 12
        yield f"the loss of a step is {float(whole.loss):.{digits}g}, and {float(other.loss):.{digits}g} with {words}"
    for name, gradient in whole.gradients.items():
        if name not in other.gradients or not torch.allclose(gradient, other.gradients[name], TOLERANCE, TOLERANCE):
            yield f"the gradient of {name.rpartition('_')[0]} is another one with {words}"
    for name, value in whole.metrics.items():
        if name in other.metrics and not torch.isclose(value.double(), other.metrics[name].double(), 1e-5, 1e-6):
            yield f"the metric '{name}' is {float(value):.5g}, and {float(other.metrics[name]):.5g} with {words}"


@contextmanager
def _detached(recorded: list[Tensor], *, replay: bool) -> Iterator[None]:
    """Record what is detached, in order, or return what was recorded: a constant to finite differences."""
    original, position = Tensor.detach, iter(recorded)

    def detach(self: Tensor) -> Tensor:
        value = original(self)
        if not replay:
            recorded.append(value)
            return value
        return next(position, value)

    with patch.object(Tensor, "detach", detach):
        yield
