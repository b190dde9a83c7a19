"""Teachers of a step's rows: what the student's scored tokens are compared with, row by row."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upweight.engine import Engine
from upweight.engine.divergences import TeacherList, top_k
from upweight.engine.head import chunk_rows
from upweight.engine.packing import build_batch, whole_blocks
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.models.reference import Reference
from upweight.train.packed_rows import PackedRow
from upweight.types import Batch, Unit

TokenLogps = list[list[NDArray[np.float32]]]  # of each unit's samples, at their scored tokens
# Returns the log-probs of units under a model, by its engine, on every rank and at the temperature of sampling.
ModelLogps = Callable[[nn.Module, Sequence[Unit], Engine], TokenLogps]


class Teacher(Protocol):
    """Adds to rows what the student is compared with there."""

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
        same_layout = (row.batch.end_BN is not None) == (self.engine.layout == "tree")
        if same_layout and all(unit.teacher_prompt is None for unit in chosen):
            return row.batch
        device, chosen = row.batch.ids_BN.device, as_seen(chosen)
        return build_batch(chosen, self.engine.layout, pad_to=whole_blocks if device.type == "cuda" else None).to(
            device
        )


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

    def logps(self, policy: nn.Module, units: Sequence[Unit], compute: ModelLogps) -> TokenLogps:
        """Return the log-probs of the units' scored tokens, each unit's under its teacher."""
        names = [unit.teacher if self.several else None for unit in units]
        known: dict[int, list[NDArray[np.float32]]] = {}
        for name in dict.fromkeys(names):
            numbers = [number for number, one in enumerate(names) if one == name]
            logps = self._of(name).logps(policy, [units[number] for number in numbers], compute)
            known |= dict(zip(numbers, logps, strict=True))
        return [known[number] for number in range(len(units))]

    def _of(self, name: str | None) -> Teacher:
        if name in self.by_name:
            return self.by_name[name]
        known = ", ".join(map(str, self.by_name))
        named = "has no teacher_id" if name is None else f"names the teacher {name!r}"
        raise UserError(f"datasets: a row {named}; distill.teachers has {known}.")
