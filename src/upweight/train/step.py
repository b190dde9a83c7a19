"""One optimizer step: units of all ranks in, this rank's gradients and metrics out."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from numpy.typing import NDArray
from torch import Tensor, nn

from upweight.engine import Engine
from upweight.engine.check import check_first_batch, check_first_gradients, gradients_flow, require_gradients
from upweight.engine.packing import build_batch, count_batch, plan_rows, row_tokens, whole_blocks
from upweight.methods.base import Method
from upweight.models.reference import Reference
from upweight.rollout.units import SHOWN
from upweight.train.distributed.ranks import all_gather_objects
from upweight.train.meters import Meters, union_over_ranks
from upweight.types import Batch, Loss, Mean, Outputs, Sample, Unit

GROWTH = 2  # times longer than what was proven: few proofs, and none far beyond one
SHORT = 1024  # tokens of a unit whose activations are kept to check its gradients
EXCERPT = 256  # tokens of a sample that stand for it where a plain forward of the whole might not fit one rank


@dataclass
class StepRunner:
    """Cuts a step into packed rows, runs them, and divides by the counts of the whole step over all ranks."""

    method: Method
    engine: Engine
    accelerator: Accelerator
    token_budget: int
    reference: Reference | None = None
    dtype: torch.dtype = torch.float32  # what forwards compute in
    temperature: float = 1.0  # that completions are sampled at; their log-probs are taken at the same
    skip_zero_advantage: bool = False  # leave out samples that cannot contribute to the gradient
    meters: Meters = field(default_factory=Meters)
    tokens: int = 0  # forwarded by this rank since somebody last set it to zero
    largest: int = 0  # tokens of the largest row of the last plan, on any rank
    checked: tuple[int, int] | None = None  # the longest sequence and the largest row when rows were last proven
    collects: list[str] = field(default_factory=list)  # names of what the method collects, on any rank

    @property
    def shares(self) -> int:
        """Parts that a step is dealt in: one for each rank, or for each group of ranks that share their rows."""
        return self.accelerator.num_processes // self._context_size

    @property
    def _context_size(self) -> int:
        return 1 if self.engine.context is None else self.engine.context.size

    @property
    def _reports(self) -> bool:
        """Whether this rank reports what all ranks of its group know."""
        return self.engine.context is None or self.engine.context.rank == 0

    @property
    def _under_zero(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def train(self, model: nn.Module, units: Sequence[Unit], known_counts: Mapping[str, float] | None = None) -> Tensor:
        """Gradients of a step; returns a loss whose mean over ranks is the step's.

        `known_counts` replaces counts that are not the step's own. Nothing is metered before the last backward, so
        that a step that ran out of memory can be tried again.
        """
        counts = self._counts(units, known_counts or {})
        working = units
        if self.skip_zero_advantage:
            working = [unit for unit in units if any(map(self.method.contributes, unit.samples))]
        rows = self.rows(working) or [Row(self._batch([]), ())]
        known, prepared = self._prepare(model, rows)
        first = self.checked is None
        if checks := self._needs_check(working):
            self._check(model, max(rows, key=_longest), working)
        total = torch.zeros((), device=self.accelerator.device)
        metered: list[Mapping[str, Mean]] = []
        for number, row in enumerate(rows):
            # Where weights are sharded, gradients are too, after each row: a rank may not have room for all of them.
            last = number == len(rows) - 1
            at_once = last or self.accelerator.is_fsdp2 or self._under_zero
            if self._under_zero:  # its step is part of the last backward
                self.accelerator.sync_gradients = last
            with contextlib.nullcontext() if at_once else self.accelerator.no_sync(model):
                out = self._outputs(model, row, known[number])
                share = self._row_loss(out, row, counts, prepared, metered)
                self.accelerator.backward(share)
            total += share.detach() / self._context_size
        if checks and first and not self._under_zero:  # which has its gradients elsewhere
            self._check_gradients(model, counts)
        for metrics in metered:
            self.meters.add(metrics)
        if self.skip_zero_advantage:
            parts = {"forwarded_share": (len(working), len(units)), "skipped_zero_adv_batches": (not working, 1)}
            for name, part in parts.items():
                self.meters.add({name: Mean(*torch.tensor(part, dtype=torch.float64).to(self.accelerator.device))})
        self.tokens += sum(row.batch.ids_BN.numel() for row in rows if row.real and self._reports)
        return total

    @torch.no_grad()
    def evaluate(self, model: nn.Module, units: Sequence[Unit]) -> tuple[Loss, dict[str, Tensor]]:
        """Sums over all ranks of a step without gradients, and the counts that divide them."""
        rows = self.rows(units)
        counts = self._counts(units)
        known, prepared = self._prepare(model, rows)
        sums = {unit: torch.zeros_like(count) for unit, count in counts.items()}
        for number, row in enumerate(rows):
            out = self._outputs(model, row, known[number])
            if row.real:
                loss = self.method.loss(out, row.batch, prepared)
                self.meters.add(loss.metrics)
                sums = {unit: total + loss.sums[unit].float() for unit, total in sums.items()}
        return Loss(self._reduce(sums)), counts

    def rows(self, units: Sequence[Unit]) -> list["Row"]:
        """This rank's forwards; every rank has the same number, some of them idle."""
        # Demonstrations among samples have rows of their own: nothing was sampled there, at no temperature.
        shown = [self.method.online and unit.samples[0].label == SHOWN for unit in units]
        rows: list[Row] = []
        self.largest = 0
        for kind, temperature in ((False, self.temperature), (True, 1.0)):
            numbers = [number for number, own in enumerate(shown) if own == kind]
            chosen = [units[number] for number in numbers]
            plan = plan_rows(chosen, self.token_budget, self.shares, self.engine.layout)
            if chosen:  # the first rank's first row is the largest
                self.largest = max(self.largest, row_tokens([chosen[n] for n in plan[0][0]], self.engine.layout))
            rows += [
                Row(self._batch([chosen[n] for n in row]), tuple(numbers[n] for n in row), temperature)
                for row in plan[self.accelerator.process_index // self._context_size]
            ]
        return rows

    @torch.no_grad()
    def logps(self, model: nn.Module, units: Sequence[Unit]) -> list[list[NDArray[np.float32]]]:
        """Log-probs of each unit's samples under the model as it is, on every rank; one for each scored token.

        A first token has no log-prob and gets zero.
        """
        found: dict[int, list[NDArray[np.float32]]] = {}
        for row in self.rows(units):
            logps_T = self.engine(model, row.batch, temperature=row.temperature).logps_T
            assert logps_T is not None
            samples = [sample for number in row.units for sample in units[number].samples]
            counts = np.bincount(row.batch.sequence_T.cpu().numpy(), minlength=len(samples))
            parts = iter(np.split(logps_T.float().cpu().numpy(), np.cumsum(counts)[:-1]))
            for number in row.units:
                pairs = [(int(sample.scored.sum()), next(parts)) for sample in units[number].samples]
                found[number] = [np.pad(part, (scored - len(part), 0)) for scored, part in pairs]
        shares = all_gather_objects(found if self._reports else {})
        everyone = {number: parts for own in shares for number, parts in own.items()}
        return [everyone[number] for number in range(len(units))]

    def _batch(self, units: Sequence[Unit]) -> Batch:
        device = self.accelerator.device
        pad_to = whole_blocks if device.type == "cuda" else None
        return build_batch(units, self.engine.layout, self.method.head == "tokens", pad_to).to(device)

    def _counts(self, units: Sequence[Unit], known: Mapping[str, float] = MappingProxyType({})) -> dict[str, Tensor]:
        """Units of the whole step; every rank has all of it before its eyes."""
        counts = self.method.count(count_batch(units, self.method.head == "tokens"))
        counts |= {name: torch.tensor(float(known[name])) for name in counts if name in known}
        return dict(zip(counts, torch.stack(list(counts.values())).to(self.accelerator.device).unbind(), strict=True))

    def _reduce(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        reduced = self.accelerator.reduce(torch.stack(list(values.values())) * self._reports, "sum")
        assert isinstance(reduced, Tensor)
        return dict(zip(values, reduced.unbind(), strict=True))

    def _prepare(self, model: nn.Module, rows: Sequence["Row"]) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Reference log-probs that are known by now, and what the method needs to know about the whole step."""
        if not self.method.needs_preparation:
            return [None] * len(rows), {}
        collected: dict[str, list[Tensor]] = {}
        known: list[Tensor | None] = []
        with torch.no_grad():
            for row in rows:
                out = self._outputs(model, row, None)
                known.append(out.ref_logps_T)
                if row.real:
                    for name, values in self.method.collect(out, row.batch).items():
                        collected.setdefault(name, []).append(values.float())
        return known, self.method.prepare(self._join(collected))

    def _join(self, collected: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Values of all rows and ranks, end to end; ranks pad with NaN to the longest."""
        if self.accelerator.num_processes == 1:
            return {name: torch.cat(values) for name, values in collected.items()}
        if not self.collects:  # the same in every step
            self.collects = union_over_ranks(set(collected))
        joined: dict[str, Tensor] = {}
        for name in self.collects:
            nothing = [torch.zeros(0, device=self.accelerator.device)]
            own = torch.cat(collected.get(name, nothing) if self._reports else nothing)
            padded = self.accelerator.pad_across_processes(own, pad_index=float("nan"))  # pyright: ignore[reportArgumentType]
            gathered = self.accelerator.gather(padded)
            assert isinstance(gathered, Tensor)
            joined[name] = gathered[~gathered.isnan()]
        return joined

    def _outputs(self, model: nn.Module, row: "Row", ref_logps_T: Tensor | None) -> Outputs:
        """Policy outputs of a row with the reference's log-probs beside them."""
        batch = row.batch
        known = batch.ref_logps_T if batch.ref_logps_T is not None else ref_logps_T
        if known is None and self.reference is not None:
            with torch.no_grad(), self.reference.use(model) as reference:
                known = self.engine(reference, batch, temperature=row.temperature).logps_T
        out = self.engine(model, batch, self.method.statistics, temperature=row.temperature)
        return out if known is None else dataclasses.replace(out, ref_logps_T=known)

    def _row_loss(
        self,
        out: Outputs,
        row: "Row",
        counts: dict[str, Tensor],
        prepared: dict[str, Tensor],
        metered: list[Mapping[str, Mean]],
    ) -> Tensor:
        """This row's part of the loss, times the number of ranks, since gradients are averaged over them.

        Ranks that share a row have the same part, and each the gradient of its own tokens.
        """
        if not row.real:
            scored = out.logps_T if out.logps_T is not None else out.scores_TC
            assert scored is not None
            return scored.sum() * 0.0
        loss = self.method.loss(out, row.batch, prepared)
        metered.append(loss.metrics)
        parts = [total / counts[unit].clamp(min=1) for unit, total in loss.sums.items()]
        return torch.stack(parts).sum() * self.accelerator.num_processes

    def _needs_check(self, units: Sequence[Unit]) -> bool:
        """Whether rows are to be proven: at first, and where a sequence or row is much longer than those proven.

        Some positions and scales change beyond a length only. All ranks come to the same answer, since each has the
        whole step before its eyes.
        """
        # Without an advantage there may be no gradient to check: at the start the KL has none either.
        if not any(sample.advantage != 0 and _is_scored(sample) for unit in units for sample in unit.samples):
            return False
        longest, before = max(len(sample.ids) for unit in units for sample in unit.samples), self.checked or (0, 0)
        # Ranks that share rows compare excerpts, which do not grow.
        grows = self.checked is None or self.engine.context is None
        outgrown = grows and (longest >= GROWTH * before[0] or self.largest >= GROWTH * before[1])
        if outgrown:
            self.checked = max(longest, before[0]), max(self.largest, before[1])
        return outgrown

    def _check(self, model: nn.Module, row: "Row", units: Sequence[Unit]) -> None:
        """A row against plain forwards, jointly for all ranks; a short unit of it by gradients too."""
        own = [unit for unit in (units[number] for number in row.units) if any(map(_is_scored, unit.samples))]
        batch = row.batch if own else self._batch([])
        if self.engine.context is not None:
            own = [_excerpt(unit) for unit in own[:2]]
            batch = self._batch(own)
        found = [check_first_batch(self.engine, model, batch, self.dtype)]
        if not (self.accelerator.is_fsdp2 or self._under_zero):
            short = [unit for unit in own if sum(len(sample.ids) for sample in unit.samples) <= SHORT]
            batch = self._batch(short[:1])
            plain = self.accelerator.unwrap_model(model)
            found.append(check_first_gradients(self.engine, plain, batch, self.dtype))
        worst = self.accelerator.gather(
            torch.tensor([[check.difference for check in found]], device=self.accelerator.device)
        )
        assert isinstance(worst, Tensor)
        for check, difference in zip(found, worst.amax(0).tolist(), strict=True):
            dataclasses.replace(check, difference=difference).require()

    def _check_gradients(self, model: nn.Module, counts: dict[str, Tensor]) -> None:
        """Whether the first step's gradients reach the weights of any rank."""
        flowing = torch.tensor([float(gradients_flow(model))], device=self.accelerator.device)
        found = self.accelerator.gather(flowing)
        assert isinstance(found, Tensor)
        if all(float(count) > 0 for count in counts.values()):
            require_gradients(bool(found.any()))


@dataclass(frozen=True, eq=False)
class Row:
    """A forward of this rank; one without units is idle and only keeps step with the others."""

    batch: Batch
    units: tuple[int, ...]
    temperature: float = 1.0

    @property
    def real(self) -> bool:
        return bool(self.units)


def _longest(row: Row) -> int:
    return int(row.batch.position_BN.max()) if row.real else -1


def _is_scored(sample: Sample) -> bool:
    return bool(sample.scored[1:].any())


def _excerpt(unit: Unit) -> Unit:
    """A unit with the tokens around the first scored one of each sample."""
    samples: list[Sample] = []
    for sample in unit.samples:
        first = int(sample.scored.argmax())
        around = slice(max(0, first - EXCERPT // 2), first + EXCERPT // 2)
        samples.append(Sample(ids=sample.ids[around], scored=sample.scored[around]))
    return Unit(tuple(samples))
