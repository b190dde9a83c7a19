"""Metrics between two logs: summed on the device and reduced over ranks once per log."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from upweight.train.distributed.ranks import all_gather_objects
from upweight.types import Mean


class Meters:
    """Running sums and weights of named metrics."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Mean]) -> None:
        """Add a batch's metrics without a device sync."""
        for name, mean in metrics.items():
            pair = torch.stack([mean.total.detach(), mean.weight.detach()]).double()
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means over all ranks since the last call; a metric without weight is left out."""
        names = union_over_ranks(set(self._sums))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        table = accelerator.reduce(torch.stack([self._sums.get(name, nothing) for name in names]), "sum")
        assert isinstance(table, Tensor)
        self._sums = {}
        return {name: total / weight for name, (total, weight) in zip(names, table.tolist(), strict=True) if weight}


def union_over_ranks(names: set[str]) -> list[str]:
    """Return the names that any rank has, in the same order on every rank."""
    return sorted({name for of_rank in all_gather_objects(names) for name in of_rank})
