"""Metrics between two logs: summed on the device and reduced over ranks once per log."""

import math
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from upweight.train.distributed.ranks import all_gather_objects
from upweight.types import Extreme, Metrics

Name = TypeVar("Name", str, tuple[str, int])


class Meters:
    """Running sums and weights of named metrics, and their extremes."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._extremes: dict[tuple[str, int], Tensor] = {}  # by name and sign

    def add(self, metrics: Metrics) -> None:
        """Add a batch's metrics without a device sync."""
        for name, metric in metrics.items():
            if isinstance(metric, Extreme):
                key, value = (name, metric.sign), metric.value.detach().double()
                self._extremes[key] = torch.maximum(self._extremes.get(key, value), value)
            else:
                pair = torch.stack([metric.total.detach(), metric.weight.detach()]).double()
                self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means and extremes over all ranks since the last call; what has no value is left out."""
        return self._drain_means(accelerator) | self._drain_extremes(accelerator)

    def _drain_extremes(self, accelerator: Accelerator) -> dict[str, float]:
        keys, extremes, self._extremes = union_over_ranks(set(self._extremes)), self._extremes, {}
        if not keys:
            return {}
        nothing = torch.full((), -torch.inf, dtype=torch.float64, device=accelerator.device)
        table = accelerator.gather(torch.stack([extremes.get(key, nothing) for key in keys])[None])
        assert isinstance(table, Tensor)
        largest = zip(keys, table.amax(0).tolist(), strict=True)
        return {name: sign * value for (name, sign), value in largest if value > -math.inf}

    def _drain_means(self, accelerator: Accelerator) -> dict[str, float]:
        names = union_over_ranks(set(self._sums))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        table = accelerator.reduce(torch.stack([self._sums.get(name, nothing) for name in names]), "sum")
        assert isinstance(table, Tensor)
        self._sums = {}
        return {name: total / weight for name, (total, weight) in zip(names, table.tolist(), strict=True) if weight}


def union_over_ranks(names: set[Name]) -> list[Name]:
    """Return the names that any rank has, in the same order on every rank."""
    return sorted({name for of_rank in all_gather_objects(names) for name in of_rank})
