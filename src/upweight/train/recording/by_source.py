"""The loss of each dataset of a mixture: the method's loss over the sequences that came from it."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from upweight.methods.base import Method
from upweight.train.packed_rows import PackedRow
from upweight.types import Batch, Mean, Metrics, Outputs, Unit


@torch.no_grad()
def losses_by_source(
    method: Method,
    out: Outputs,
    row: PackedRow,
    units: Sequence[Unit],
    *,
    prepared: Mapping[str, Tensor],
    names: Mapping[int, str],
) -> Metrics:
    """Return the mean loss of each named source in a packed row; `names` are by the number of a unit."""
    of_sequence = [names[number] for number in row.unit_numbers for _ in units[number].samples]
    metrics: dict[str, Mean] = {}
    for name in dict.fromkeys(of_sequence):
        keep_S = torch.tensor([other == name for other in of_sequence], device=row.batch.sequence_T.device)
        part, batch = of_sequences(out, row.batch, keep_S)
        counts, sums = method.count(batch), method.loss(part, batch, dict(prepared)).sums
        weight = counts[next(iter(sums))]  # terms with other denominators are weighted alike
        loss = torch.stack([total / counts[term].clamp(min=1) for term, total in sums.items()]).sum()
        metrics[f"loss/{name}"] = Mean(loss * weight, weight.to(loss))
    return metrics


def of_sequences(out: Outputs, batch: Batch, keep_S: Tensor) -> tuple[Outputs, Batch]:
    """Return the outputs and batch fields of some sequences, which are renumbered; tokens stay where they are."""
    keep_T, number_S = keep_S[batch.sequence_T], torch.cumsum(keep_S, 0) - 1
    parts: dict[str, Tensor] = {}
    for name, values in vars(batch).items():
        axes = name.rsplit("_", 1)[-1]
        if isinstance(values, Tensor) and axes[0] in "TS":
            parts[name] = values[keep_T if axes[0] == "T" else keep_S]
    parts["sequence_T"] = number_S[parts["sequence_T"]]
    if batch.pair_P2 is not None:
        keep_P = keep_S[batch.pair_P2[:, 0]]
        parts["pair_P2"] = number_S[batch.pair_P2[keep_P]]
        if batch.margin_P is not None:
            parts["margin_P"] = batch.margin_P[keep_P]
    by_token = {name: values for name, values in vars(out).items() if name.rsplit("_", 1)[-1][0] == "T"}
    kept = {name: values[keep_T] for name, values in by_token.items() if isinstance(values, Tensor)}
    selected = dataclasses.replace(batch, num_sequences=int(keep_S.sum()), **parts)
    return dataclasses.replace(out, **kept), selected
