"""Log-probs of a teacher with other tokens over those of a sampler, by the stretches that tokens of both bound."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from upweight.train.distill.align import Alignment
from upweight.types import Sample, Unit

Logps = NDArray[np.float32]


def teacher_units(units: Sequence[Unit], alignments: Sequence[Sequence[Alignment]]) -> list[Unit]:
    """Return units in the teacher's tokens, of which those in spans of the scored text are scored."""
    return [
        replace(
            unit,
            samples=tuple(
                Sample(one.ids, _in_spans(sample, one), label=sample.label)
                for sample, one in zip(unit.samples, of_samples, strict=True)
            ),
            teacher_prompt=None,
        )
        for unit, of_samples in zip(units, alignments, strict=True)
    ]


def span_gaps(sample: Sample, aligned: Alignment, teacher: Logps, sampler: Logps) -> tuple[Logps, Logps]:
    """Return for each scored token the log-ratio of its span; and that divided by the number of its tokens.

    All tokens of a span have its whole log-ratio: it is one action, whose log-prob is the sum of theirs.
    """
    chosen = _chosen(sample, aligned)
    starts_M, ends_M = aligned.spans.student_2M[:, chosen]
    ours, theirs = np.zeros(len(sample.ids)), np.zeros(len(aligned.ids))
    ours[sample.loss_mask], theirs[_in_spans(sample, aligned)] = sampler, teacher
    gap_M = _sums(theirs, aligned.spans.teacher_2M[:, chosen]) - _sums(ours, aligned.spans.student_2M[:, chosen])
    values, shares = np.zeros((2, len(sample.ids)), np.float32)
    for start, end, gap in zip(starts_M.tolist(), ends_M.tolist(), gap_M.tolist(), strict=True):
        values[start:end], shares[start:end] = gap, gap / (end - start)
    return values[sample.loss_mask], shares[sample.loss_mask]


def _chosen(sample: Sample, aligned: Alignment) -> NDArray[np.bool_]:
    """Return which spans are of scored text that both read alike, and that something precedes."""
    (starts_M, _), (teacher_M, ends_M) = aligned.spans.student_2M, aligned.spans.teacher_2M
    return sample.loss_mask[starts_M] & aligned.spans.same_M & (starts_M > 0) & (teacher_M > 0) & (ends_M > teacher_M)


def _in_spans(sample: Sample, aligned: Alignment) -> NDArray[np.bool_]:
    """Return which of the teacher's tokens are in those spans."""
    inside = np.zeros(len(aligned.ids), np.bool_)
    for start, end in aligned.spans.teacher_2M[:, _chosen(sample, aligned)].T.tolist():
        inside[start:end] = True
    return inside


def _sums(values: NDArray[np.float64], bounds_2M: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of values between bounds."""
    running = np.append(0.0, values.cumsum())
    return running[bounds_2M[1]] - running[bounds_2M[0]]
