"""Small batches and engine outputs made of chosen numbers, for tests of the methods."""

import math

import torch
from accelerate import Accelerator

from upweight.train.recording.metrics import Meters
from upweight.types import Batch, Outputs


def sigma(x: float) -> float:
    """The logistic function."""
    return 1 / (1 + math.exp(-x))


def tensor(values, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def flat(sequences) -> torch.Tensor:
    """Per-sequence lists end to end, as one tensor over scored tokens."""
    return tensor([value for sequence in sequences for value in sequence])


def made_batch(lengths, **known) -> Batch:
    """A batch whose sequences have these numbers of scored tokens; lists in `known` become tensors."""
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    zeros_BN = torch.zeros(1, max(1, len(sequence_T)), dtype=torch.int64)
    fields = {
        "ids_BN": zeros_BN,
        "position_BN": zeros_BN,
        "end_BN": None,
        "length_B": None,
        "source_T": torch.zeros_like(sequence_T),
        "target_T": torch.zeros_like(sequence_T),
        "sequence_T": sequence_T,
        "num_sequences": len(lengths),
    }
    whole = {"pair_P2", "label_S", "target_T"}
    for name, value in known.items():
        if isinstance(value, list):
            kind = torch.int64 if name in whole else torch.bool if name == "prompt_T" else torch.float64
            value = torch.tensor(value, dtype=kind)  # noqa: PLW2901
        fields[name] = value
    return Batch(**fields)


def made_outputs(logps, ref=None, **more) -> Outputs:
    """Outputs with these per-sequence log-probs, and zeros for the statistics that only metrics read."""
    logps_T = flat(logps)
    zeros_T = torch.zeros_like(logps_T)
    fields = {"entropy_T": zeros_T, "mean_logit_T": zeros_T, "is_top_T": zeros_T, "log_collision_T": zeros_T} | more
    return Outputs(logps_T=logps_T, ref_logps_T=None if ref is None else flat(ref), **fields)


def total_loss(method, out, batch) -> float:
    """The loss of a step that consists of this one batch."""
    prepared = method.prepare(method.collect(out, batch))
    counts, sums = method.count(batch), method.loss(out, batch, prepared).sums
    assert counts.keys() == sums.keys()
    return float(sum(sums[unit] / counts[unit] for unit in sums))


def metrics_of(method, out, batch) -> dict[str, float]:
    """The metrics of a step that consists of this one batch."""
    prepared = method.prepare(method.collect(out, batch))
    meters = Meters()
    meters.add(method.loss(out, batch, prepared).metrics)
    return meters.drain(Accelerator(cpu=True))
