"""Teachers of a step's rows: what the student's scored tokens are compared with, row by row."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upweight.engine import Engine
from upweight.engine.divergences import TeacherList, TeacherStates, top_k
from upweight.engine.head import chunk_rows
from upweight.engine.outcomes import Matched
from upweight.engine.packing import build_batch, whole_blocks
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.models.reference import Reference
from upweight.train.distill.align import Aligner
from upweight.train.distill.spans import span_gaps, teacher_units
from upweight.train.packed_rows import PackedRow
from upweight.types import Batch, Mean, Sample, Unit

TokenLogps = list[list[NDArray[np.float32]]]  # of each unit's samples, at their scored tokens
# Returns the log-probs of units under a model, by its engine, on every rank and at the temperature of sampling.
ModelLogps = Callable[[nn.Module, Sequence[Unit], Engine], TokenLogps]
UnitGaps = list[list["Gaps"]]  # of each unit's samples


class Gaps(NamedTuple):
    """A teacher's log-prob over the sampler's at the scored tokens of a sample."""

    values: NDArray[np.float32]  # of the span that a token is in
    shares: NDArray[np.float32]  # the same divided by the tokens of the span, so that the sum counts each span once


class Teacher(Protocol):
    """Adds to rows what the student is compared with there."""

    def aligned(self, unit: Unit, *, keep: bool) -> Unit:
        """Return a unit with its text in the teacher's tokens, where these are others; see `Aligner.aligned`."""
        return unit

    def gaps(self, policy: nn.Module, units: Sequence[Unit], sampler: TokenLogps, compute: ModelLogps) -> "UnitGaps":
        """Return the teacher's log-probs of the scored tokens over those of the sampler."""
        teacher = self.logps(policy, units, compute)
        both = [[a - b for a, b in zip(*one, strict=True)] for one in zip(teacher, sampler, strict=True)]
        return [[Gaps(gap, gap) for gap in unit] for unit in both]

    def logps(self, policy: nn.Module, units: Sequence[Unit], compute: ModelLogps) -> TokenLogps:
        """Return the teacher's log-probs of the scored tokens."""
        ...

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        """Yield the rows of these units with the teacher's part; every rank calls it with as many rows."""
        ...


def as_seen(units: Sequence[Unit]) -> list[Unit]:
    """Return the units with the prompts that their teacher sees; what is scored stays the same."""
    return [unit if unit.teacher_prompt is None else _with_prompt(unit, *unit.teacher_prompt) for unit in units]


def _with_prompt(unit: Unit, length: int, prompt: NDArray[np.int64]) -> Unit:
    unscored = np.zeros(len(prompt), np.bool_)
    samples = [
        dataclasses.replace(
            sample,
            ids=np.concatenate([prompt, sample.ids[length:]]),
            loss_mask=np.concatenate([unscored, sample.loss_mask[length:]]),
        )
        for sample in unit.samples
    ]
    return dataclasses.replace(unit, samples=tuple(samples))


@dataclass(frozen=True)
class LocalTeacher(Teacher):
    """A frozen model in this process, or the policy with other weights."""

    method: Method
    reference: Reference
    engine: Engine  # of the teacher's model
    vocabulary: int  # rows of the student's head: what a teacher has beyond them is no token
    at_once: bool = False  # whether all rows of a step are forwarded together, as weights come from elsewhere
    aligner: Aligner | None = None  # where its tokens are not the student's

    def aligned(self, unit: Unit, *, keep: bool) -> Unit:
        if self.aligner is None:
            return unit
        (seen,), aligner = as_seen([unit]), self.aligner
        return dataclasses.replace(
            unit, samples=tuple(map(functools.partial(_aligned, aligner, keep=keep), unit.samples, seen.samples))
        )

    def gaps(self, policy: nn.Module, units: Sequence[Unit], sampler: TokenLogps, compute: ModelLogps) -> UnitGaps:
        if self.aligner is None:
            return super().gaps(policy, units, sampler, compute)
        seen = as_seen(units)
        alignments = [[self.aligner.alignment(sample) for sample in unit.samples] for unit in seen]
        with self.reference.use(policy) as model:
            logps = compute(model, teacher_units(seen, alignments), self.engine)
        parts = zip(seen, alignments, logps, sampler, strict=True)
        return [
            [Gaps(*span_gaps(*sample)) for sample in zip(unit.samples, *of_samples, strict=True)]
            for unit, *of_samples in parts
        ]

    def logps(self, policy: nn.Module, units: Sequence[Unit], compute: ModelLogps) -> TokenLogps:
        with self.reference.use(policy) as model:
            return compute(model, as_seen(units), self.engine)

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        for part in [rows] if self.at_once else [[row] for row in rows]:
            with self.reference.use(policy) as model:
                done = [self._taught(model, row, units) for row in part]
            yield from done

    def _taught(self, model: nn.Module, row: PackedRow, units: Sequence[Unit]) -> PackedRow:
        states = self.engine.teacher_states(model, self._batch(row, units))
        if self.aligner is not None:
            return dataclasses.replace(row, teacher=self._matched(states, row.batch, self.aligner))
        states = dataclasses.replace(states, vocabulary=min(states.vocabulary, self.vocabulary))
        if self.method.teacher_top_k is None:
            return dataclasses.replace(row, teacher=states)
        rows = chunk_rows(states.hidden_TE, states.vocabulary)
        best = top_k(states, self.method.teacher_top_k, self.method.comparison.temperature, rows)
        lists = {"teacher_ids_TK": best.ids_TK, "teacher_logps_TK": best.logps_TK, "teacher_tail_T": best.tail_T}
        batch = dataclasses.replace(row.batch, **lists)
        return dataclasses.replace(row, batch=batch, teacher=TeacherList(best.ids_TK))

    def _batch(self, row: PackedRow, units: Sequence[Unit]) -> Batch:
        """Return the row's tokens in the layout of the teacher's model."""
        chosen = [units[number] for number in row.unit_numbers]
        if self.aligner is not None:
            chosen = [dataclasses.replace(one, samples=tuple(map(_as_read, one.samples))) for one in chosen]
            return self._built(chosen, row)
        same_layout = (row.batch.end_BN is not None) == (self.engine.layout == "tree")
        if same_layout and all(unit.teacher_prompt is None for unit in chosen):
            return row.batch
        return self._built(as_seen(chosen), row)

    def _built(self, units: Sequence[Unit], row: PackedRow) -> Batch:
        device = row.batch.ids_BN.device
        pad_to = whole_blocks if device.type == "cuda" else None
        return build_batch(units, self.engine.layout, pad_to=pad_to).to(device)

    def _matched(self, states: TeacherStates, batch: Batch, aligner: Aligner) -> TeacherStates:
        """Return the states with the outcomes of both vocabularies, one for each scored token of the student."""
        sizes = self.vocabulary, states.vocabulary
        matched = _outcomes(aligner, sizes, self.method.comparison.temperature, batch.ids_BN.device)
        hidden_TE = states.hidden_TE
        if batch.taught_T is not None and len(batch.taught_T) > len(hidden_TE):  # the others are scored, not compared
            hidden_TE = hidden_TE.new_zeros(len(batch.taught_T), hidden_TE.shape[1])
            hidden_TE[batch.taught_T] = states.hidden_TE
        return dataclasses.replace(states, hidden_TE=hidden_TE, matched=matched)


def _aligned(aligner: Aligner, sample: Sample, seen: Sample, *, keep: bool) -> Sample:
    """Return a sample that is compared as aligned with what its teacher sees."""
    done = aligner.aligned(seen, keep=keep)
    loss_mask = sample.loss_mask
    if not keep:
        loss_mask = np.zeros_like(loss_mask)
        behind = len(sample.ids) - len(seen.ids)  # a prompt of another length
        loss_mask[np.flatnonzero(done.loss_mask) + behind] = True
    return dataclasses.replace(sample, loss_mask=loss_mask, taught=done.taught, teacher_text=done.teacher_text)


def _with_taught(sample: Sample) -> Sample:
    """Return a sample that says which tokens are compared: all, where both models have the same tokens."""
    return (
        sample
        if sample.taught is not None
        else dataclasses.replace(sample, taught=np.ones(int(sample.loss_mask.sum()), np.bool_))
    )


def alignment_metrics(units: Sequence[Unit], aligned: Sequence[Unit], device: torch.device) -> dict[str, Mean]:
    """Return the share of scored tokens that are compared, and of those in text that a teacher reads otherwise."""
    texts = [sample.teacher_text for unit in aligned for sample in unit.samples]
    samples = [sample for unit in units for sample in unit.samples]
    read = [(one, text) for one, text in zip(samples, texts, strict=True) if text is not None]
    scored = sum(int(one.loss_mask[1:].sum()) for one, _ in read)
    counts = {
        "aligned_share": sum(len(text.at) for _, text in read),
        "unread_share": sum(text.unread for _, text in read),
    }
    total = torch.tensor([float(scored), *counts.values()]).to(device, non_blocking=True)
    return {f"distill/{name}": Mean(count, total[0]) for name, count in zip(counts, total[1:], strict=True)}


def _as_read(sample: Sample) -> Sample:
    """Return an aligned sample in the teacher's tokens."""
    assert sample.teacher_text is not None
    ids, at = sample.teacher_text.ids, sample.teacher_text.at
    loss_mask = np.zeros(len(ids), np.bool_)
    loss_mask[at] = True
    return Sample(ids, loss_mask)


@functools.lru_cache(maxsize=16)
def _outcomes(aligner: Aligner, sizes: tuple[int, int], temperature: float, device: torch.device) -> Matched:
    """Return what models with so many logits are compared over."""
    ours, theirs = aligner.shared
    known = (ours < sizes[0]) & (theirs < sizes[1])
    shared = [torch.from_numpy(ids[known]).to(device) for ids in (ours, theirs)]
    return Matched.of(shared[0], shared[1], sizes, temperature)


@dataclass(frozen=True)
class LoggedTeacher(Teacher):
    """A teacher whose log-probs are in the rows."""

    method: Method

    def logps(self, policy: nn.Module, units: Sequence[Unit], compute: ModelLogps) -> TokenLogps:
        raise UserError("distill.teacher: nothing is logged of tokens that are sampled now.")

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        for row in rows:
            ids_TK, logps_TK = row.batch.teacher_ids_TK, row.batch.teacher_logps_TK
            if row.unit_numbers and (ids_TK is None or logps_TK is None):
                remedy = "`upweight distill-log` writes them"
                raise UserError(f"distill.teacher: logged, but a row has no teacher_ids and teacher_logps; {remedy}.")
            yield listed_row(row, ids_TK, logps_TK, self.method)


def listed_row(row: PackedRow, ids_TK: Tensor | None, logps_TK: Tensor | None, method: Method) -> PackedRow:
    """Return a row that is compared with lists at temperature 1, of which the first `teacher_top_k` count."""
    if ids_TK is None or logps_TK is None:  # a row without units
        ids_TK = torch.zeros_like(row.batch.target_T)[:, None]
        logps_TK = torch.zeros_like(ids_TK, dtype=torch.float32)
    ids_TK, logps_TK = ids_TK[:, : method.teacher_top_k], logps_TK[:, : method.teacher_top_k]
    # Renormalised over what is listed, log-probs at 1 divided by a temperature are those at the temperature.
    logps_TK = logps_TK / method.comparison.temperature
    batch = dataclasses.replace(row.batch, teacher_ids_TK=ids_TK, teacher_logps_TK=logps_TK)
    return dataclasses.replace(row, batch=batch, teacher=TeacherList(ids_TK))


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run by name; a single one has none, and teaches every row."""

    by_name: Mapping[str | None, Teacher]

    @property
    def several(self) -> bool:
        """Whether rows name their teachers."""
        return None not in self.by_name

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        """Yield the rows in order, each with its teacher's part."""
        for name, part in groupby(rows, key=lambda row: row.teacher_name if self.several else None):
            yield from self._of(name).taught(policy, list(part), units)

    def aligned(self, units: Sequence[Unit], *, keep: bool) -> Sequence[Unit]:
        """Return the units with their texts in the tokens of teachers, where these are others."""
        aligned = [self._of(unit.teacher if self.several else None).aligned(unit, keep=keep) for unit in units]
        return [dataclasses.replace(unit, samples=tuple(map(_with_taught, unit.samples))) for unit in aligned]

    def gaps(self, policy: nn.Module, units: Sequence[Unit], sampler: TokenLogps, compute: ModelLogps) -> UnitGaps:
        """Return the log-probs of scored tokens, each unit's under its teacher, over those of the sampler."""
        names = [unit.teacher if self.several else None for unit in units]
        known: dict[int, list[Gaps]] = {}
        for name in dict.fromkeys(names):
            numbers = [number for number, one in enumerate(names) if one == name]
            chosen, drawn = [units[number] for number in numbers], [sampler[number] for number in numbers]
            known |= dict(zip(numbers, self._of(name).gaps(policy, chosen, drawn, compute), strict=True))
        return [known[number] for number in range(len(units))]

    @property
    def align(self) -> bool:
        """Whether any of them has other tokens than the student."""
        return any(isinstance(one, LocalTeacher) and one.aligner is not None for one in self.by_name.values())

    def _of(self, name: str | None) -> Teacher:
        if name in self.by_name:
            return self.by_name[name]
        known = ", ".join(map(str, self.by_name))
        named = "has no teacher_id" if name is None else f"names the teacher {name!r}"
        raise UserError(f"datasets: a row {named}; distill.teachers has {known}.")
