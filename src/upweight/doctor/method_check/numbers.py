"""A step of random numbers in place of a model's outputs, cut into micro-batches in any way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upweight.methods.base import Method
from upweight.types import Batch, Mean, Metric, Outputs

LENGTHS = (3, 5, 1, 4, 2, 6, 40, 0, 17, 2, 3, 12)  # scored tokens of sequences; two neighbours are a unit
UNITS = len(LENGTHS) // 2
CLASSES = 2
LEARNED = ("logps_T", "entropy_T", "scores_TC")  # outputs through which a gradient reaches the weights


@dataclass(frozen=True)
class Result:
    """What a step comes to: its loss, the gradients of the model's outputs, its metrics."""

    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, Tensor]


class NumberStep:
    """A step whose outputs are leaves: what the engine would compute from the weights."""

    def __init__(self, method: Method, seed: int = 7) -> None:
        random = torch.Generator().manual_seed(seed)
        self.method = method
        self.lengths = [1] * len(LENGTHS) if method.head == "sequence_score" else list(LENGTHS)
        tokens, count = sum(self.lengths), len(self.lengths)

        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=random, dtype=torch.float64)

        logps_T = -draw(tokens) - 0.1
        self.outputs = {
            "logps_T": logps_T,
            "ref_logps_T": logps_T + 0.4 * draw(tokens) - 0.2,
            "scores_TC": draw(tokens, CLASSES),
            "is_top_T": draw(tokens) > 0.5,
            **{name: draw(tokens) for name in ("entropy_T", "log_sum_exp_T", "mean_logit_T")},
            "log_collision_T": -draw(tokens),
        }
        self.per_token = {
            "old_logps_T": logps_T + 0.6 * draw(tokens) - 0.3,
            "sampler_logps_T": logps_T + 0.8 * draw(tokens) - 0.4,
            "target_T": torch.randint(0, CLASSES, (tokens,), generator=random),
            "prompt_T": draw(tokens) > 0.7,
            "version_T": torch.full((tokens,), 3.0, dtype=torch.float64),
            "lag_T": torch.randint(0, 3, (tokens,), generator=random).double(),
        }
        self.per_sequence = {"advantage_S": draw(count) - 0.5}
        if method.data == "labelled":
            kinds = (1, 0, -1) if method.mismatched else (1, 0)
            self.per_sequence["label_S"] = torch.tensor([kinds[n % len(kinds)] for n in range(count)])
        self.margin_P = draw(UNITS)
        for name in LEARNED:
            self.outputs[name].requires_grad_()

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {name: self.outputs[name] for name in LEARNED}

    def part(self, units: Iterable[int]) -> tuple[Outputs, Batch]:
        """Return the outputs and the batch of some units."""
        sequences = [number for unit in units for number in (2 * unit, 2 * unit + 1)]
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        tokens = torch.tensor([t for s in sequences for t in range(starts[s], starts[s + 1])], dtype=torch.int64)
        lengths = [self.lengths[number] for number in sequences]
        sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        empty = torch.zeros(1, max(1, len(tokens)), dtype=torch.int64)
        known: dict[str, Any] = {name: values[tokens] for name, values in self.per_token.items()}
        known |= {name: values[sequences] for name, values in self.per_sequence.items()}
        batch = Batch(
            empty, empty, None, None, torch.zeros_like(sequence_T), known.pop("target_T"), sequence_T, len(lengths),
            pair_P2=torch.arange(len(sequences)).view(-1, 2), margin_P=self.margin_P[[n // 2 for n in sequences[::2]]],
            longest=max(lengths, default=0), **known,
        )  # fmt: skip
        return Outputs(**{name: self.outputs[name][tokens] for name in self._computed}), batch

    @property
    def _computed(self) -> set[str]:
        """The outputs that the engine and the reference compute for the method, and no others."""
        main = "logps_T" if self.method.head == "tokens" else "scores_TC"
        return {main, *self.method.statistics, *(["ref_logps_T"] if self.method.needs_reference else [])}

    def prepared(self, parts: Sequence[tuple[Outputs, Batch]]) -> dict[str, Tensor]:
        """Return what the loss reads about the whole step, from the values of all parts."""
        if not self.method.needs_preparation:
            return {}
        collected = [self.method.collect(out, batch) for out, batch in parts]
        joined = {name: torch.cat([one[name].detach() for one in collected]) for name in collected[0]}
        return self.method.prepare({name: values[~values.isnan()] for name, values in joined.items()})

    def run(self, cuts: Sequence[Sequence[int]]) -> Result:
        """Return what the step comes to when it is cut like this."""
        parts = [self.part(cut) for cut in cuts]
        prepared = self.prepared(parts)
        counts = summed(self.method.count(batch) for _, batch in parts)
        losses = [self.method.loss(out, batch, prepared) for out, batch in parts]
        total = loss_of(summed(loss.sums for loss in losses), counts)
        every = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True) if total.requires_grad else ()
        gradients = {name: one for name, one in zip(self.leaves, every, strict=False) if one is not None}
        return Result(total.detach(), gradients, joined_metrics(loss.metrics for loss in losses))


def summed(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sums of values by name."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        totals = {**totals, **{name: totals[name] + value if name in totals else value for name, value in part.items()}}
    return totals


def loss_of(sums: dict[str, Tensor], counts: dict[str, Tensor]) -> Tensor:
    """Return the loss of a step from its sums and counts, as training computes it."""
    return torch.stack([total / counts[name].clamp(min=1) for name, total in sums.items()]).sum()


def joined_metrics(parts: Iterable[Any]) -> dict[str, Tensor]:
    """Return metrics over micro-batches: means by their weights, extremes as they are."""
    groups: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            groups.setdefault(name, []).append(metric)
    joined = {}
    for name, metrics in groups.items():
        means = [one for one in metrics if isinstance(one, Mean)]
        extremes = [one.value for one in metrics if not isinstance(one, Mean)]
        joined[name] = torch.stack(extremes).max() if extremes else _mean(means)
    return joined


def _mean(means: Sequence[Mean]) -> Tensor:
    weight = torch.stack([one.weight for one in means]).sum()
    return torch.stack([one.total for one in means]).sum() / weight.clamp(min=1)


KNOWN_OUTPUTS = {*LEARNED, "ref_logps_T", "is_top_T", "log_sum_exp_T", "mean_logit_T", "log_collision_T"}
