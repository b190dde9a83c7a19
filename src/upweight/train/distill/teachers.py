"""Teachers of a step's rows: what the student's scored tokens are compared with, row by row."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from torch import nn

from upweight.engine import Engine
from upweight.engine.divergences import TeacherList, top_k
from upweight.engine.logits import chunk_rows
from upweight.engine.packing import build_batch, whole_blocks
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.models.reference import Reference
from upweight.train.packed_rows import PackedRow
from upweight.types import Batch, Unit


class Teacher(Protocol):
    """Adds to rows what the student is compared with there."""

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        """Yield the rows of these units with the teacher's part; every rank calls it with as many rows."""
        ...


@dataclass(frozen=True)
class LocalTeacher(Teacher):
    """A frozen model in this process, or the policy with other weights."""

    method: Method
    reference: Reference
    engine: Engine  # of the teacher's model
    vocabulary: int  # rows of the student's head: what a teacher has beyond them is no token
    at_once: bool = False  # whether all rows of a step are forwarded together, as weights come from elsewhere

    def taught(self, policy: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterator[PackedRow]:
        for part in [rows] if self.at_once else [[row] for row in rows]:
            with self.reference.use(policy) as model:
                done = [self._taught(model, row, units) for row in part]
            yield from done

    def _taught(self, model: nn.Module, row: PackedRow, units: Sequence[Unit]) -> PackedRow:
        states = self.engine.teacher_states(model, self._batch(row, units))
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
        if (row.batch.end_BN is not None) == (self.engine.layout == "tree"):
            return row.batch
        device = row.batch.ids_BN.device
        chosen = [units[number] for number in row.unit_numbers]
        return build_batch(chosen, self.engine.layout, pad_to=whole_blocks if device.type == "cuda" else None).to(
            device
        )


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
            if name not in self.by_name:
                known = ", ".join(map(str, self.by_name))
                named = "has no teacher_id" if name is None else f"names the teacher {name!r}"
                raise UserError(f"datasets: a row {named}; distill.teachers has {known}.")
            yield from self.by_name[name].taught(policy, list(part), units)
