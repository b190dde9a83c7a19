"""What users' losses read, laid out by sequence and padded, and what they return."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from upweight.errors import UserError
from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import position_in_sequence, required, sequence_sum
from upweight.methods.users.function import Call
from upweight.types import Batch, Mean, Metric, Outputs

Values = dict[str, Callable[[], Any]]
TOKENS = ("logps", "entropy", "mask", "lengths")
POLICY = (
    "logps", "old_logps", "log_ratio", "ratio", "advantages", "sequence_advantages", "mask", "lengths", "entropy",
    "ref_logps", "sampler_logps", "correction", "versions", "lag",
)  # fmt: skip
PAIRS = (
    "chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps", "chosen_log_ratio",
    "rejected_log_ratio", "logps", "ref_logps", "entropy", "mask", "lengths",
)  # fmt: skip
LABELLED = ("log_ratio", "desirable", "kl", "logps", "ref_logps", "entropy", "mask", "lengths")
LEARNED = (
    "logps", "log_ratio", "ratio", "chosen_logps", "rejected_logps", "chosen_log_ratio", "rejected_log_ratio",
    "entropy",
)  # fmt: skip
CHECKED_CALLS = 3  # whose values are looked at, which waits for the device

_padding: ContextVar[tuple[float, int, int]] = ContextVar("padding", default=(0.0, 0, 1))


@contextmanager
def padding(value: float = 0.0, columns: int = 0, width: int = 1) -> Iterator[None]:
    """Pad with another value, so many more columns or to a least width, to see whether a function respects the mask."""
    token = _padding.set((value, columns, width))
    try:
        yield
    finally:
        _padding.reset(token)


class Padded:
    """Lays values of scored tokens out as [S, L]: a row for each sequence, its tokens first, then padding."""

    def __init__(self, batch: Batch) -> None:
        self.fill, more, width = _padding.get()
        self.laid_out = 0
        longest = len(batch.sequence_T) if batch.longest is None else batch.longest
        self.shape = (batch.num_sequences, max(width, longest) + more)
        self.index_T = batch.sequence_T * self.shape[1] + position_in_sequence(batch)

    def __call__(self, values_T: Tensor) -> Tensor:
        """Return values by scored token as [S, L]."""
        self.laid_out += 1  # each value has other padding, so that none cancels in a difference
        fill = False if values_T.dtype == torch.bool else self.fill * self.laid_out
        empty = values_T.new_full((self.shape[0] * self.shape[1],), fill)
        return empty.index_copy(0, self.index_T, values_T).view(self.shape)

    def flat(self, values_SL: Tensor) -> Tensor:
        """Return values [S, L] by scored token."""
        return values_SL.reshape(-1)[self.index_T]


def token_values(pad: Padded, out: Outputs, batch: Batch, scored_T: Tensor) -> Values:
    """Return what every loss can ask for, by scored token, of sequences in which `scored_T` is True."""
    return {
        "logps": lambda: pad(required(out.logps_T)),
        "ref_logps": lambda: pad(required(out.ref_logps_T)),
        "entropy": lambda: pad(required(out.entropy_T)),
        "mask": lambda: pad(scored_T),
        "lengths": lambda: sequence_sum(scored_T.float(), batch).clamp(min=1),
    }


def policy_values(
    pad: Padded, out: Outputs, batch: Batch, *, old_T: Tensor, correction_T: Tensor, advantage_T: Tensor, mask_T: Tensor
) -> Values:
    """Return what the loss of a policy gradient can ask for."""
    log_ratio_T = required(out.logps_T) - old_T
    sampler_T = old_T if batch.sampler_logps_T is None else batch.sampler_logps_T
    zeros_T = torch.zeros_like(old_T)
    values = token_values(pad, out, batch, mask_T)
    return values | {
        "old_logps": lambda: pad(old_T),
        "log_ratio": lambda: pad(log_ratio_T),
        "ratio": lambda: pad(log_ratio_T).exp(),
        "advantages": lambda: pad(advantage_T),
        "sequence_advantages": lambda: sequence_sum(advantage_T, batch) / values["lengths"](),
        "sampler_logps": lambda: pad(torch.where(sampler_T.isnan(), old_T, sampler_T)),
        "correction": lambda: pad(correction_T),
        "versions": lambda: pad(zeros_T if batch.version_T is None else batch.version_T),
        "lag": lambda: pad(zeros_T if batch.lag_T is None else batch.lag_T),
    }


def pair_values(pad: Padded, out: Outputs, batch: Batch, policy_P2: Tensor, ref_P2: Tensor) -> Values:
    """Return what the loss of pairs can ask for; `policy_P2` and `ref_P2` are summed log-probs."""
    pair_P2 = required(batch.pair_P2)
    by_token = token_values(pad, out, batch, torch.ones_like(batch.sequence_T, dtype=torch.bool))
    values: Values = {name: lambda value=value: value()[pair_P2] for name, value in by_token.items()}
    for side, name in enumerate(("chosen", "rejected")):
        values |= {
            f"{name}_logps": lambda side=side: policy_P2[:, side],
            f"ref_{name}_logps": lambda side=side: ref_P2[:, side],
            f"{name}_log_ratio": lambda side=side: (policy_P2 - ref_P2)[:, side],
        }
    return values


def checked_term(call: Call, result: Any, out: Outputs, **shapes: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the term and the metrics that a loss returned, or say in words why it cannot be used.

    `shapes` are those allowed, by what they are of: `tokens`, `sequences` or `pairs`.
    """
    term, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    allowed = " or ".join(f"{list(shape)} for {name}" for name, shape in shapes.items())
    if not torch.is_tensor(term):
        raise UserError(f"{call.where} returned a {type(term).__name__}; a tensor is wanted: {allowed}.")
    if term.ndim == 0:
        remedy = f"Return the terms before any average, {allowed}: the average over the whole step is taken here."
        raise UserError(f"{call.where} returned one number. {remedy}")
    if tuple(term.shape) not in shapes.values():
        raise UserError(f"{call.where} returned a tensor of shape {list(term.shape)}; wanted: {allowed}.")
    if not isinstance(metrics, Mapping):
        raise UserError(f"{call.where} returned a {type(metrics).__name__} beside its term; metrics are a dict.")
    for name, value in metrics.items():
        if not torch.is_tensor(value) or tuple(value.shape) not in shapes.values():
            given = list(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise UserError(f"{call.where} returned the metric '{name}' as {given}; wanted a tensor: {allowed}.")
    if required(out.logps_T).requires_grad and not term.requires_grad:
        learned = [name for name in call.asks if name in LEARNED]
        some = learned or (["chosen_logps", "rejected_logps"] if "pairs" in shapes else ["logps"])
        use = f"use {' or '.join(map(repr, some))} without .detach() and outside of no_grad"
        raise UserError(f"{call.where} returned a term without a gradient, so that no weight would be trained: {use}.")
    return term, dict(metrics)


def require_finite(call: Call, terms: Tensor, kept: Tensor) -> None:
    """Raise in the first calls where a term that counts is NaN or infinite; later the run's health says it."""
    if terms.device.type == "meta":  # which `upweight check-method` tries: they have no values
        return
    if call.calls <= CHECKED_CALLS and bool((bad := ~terms.isfinite() & kept).any()):
        count = f"{int(bad.sum())} of {int(kept.sum())} terms"
        remedy = "Bound exponents and guard divisions and logarithms; padding is no part of this."
        raise UserError(f"{call.where} returned NaN or infinity in {count}. {remedy}")


def token_metrics(metrics: Mapping[str, Tensor], pad: Padded, mask_T: Tensor, kept_S: Tensor) -> dict[str, Metric]:
    """Return a loss's metrics as means over the scored tokens or over the sequences."""
    return {
        name: Mean.over(value, kept_S) if value.ndim == 1 else Mean.over(pad.flat(value), mask_T)
        for name, value in metrics.items()
    }
