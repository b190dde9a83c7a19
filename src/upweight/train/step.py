"""One optimizer step: units of all ranks in, this rank's gradients and metrics out."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from numpy.typing import NDArray
from torch import Tensor, nn

from upweight.engine import Engine
from upweight.engine.activations import recompute_every_layer, save_less
from upweight.engine.check import gradients_flow, require_gradients
from upweight.engine.packing import count_batch
from upweight.errors import UserError
from upweight.methods.base import Method, required
from upweight.models.kernels.tiled_mlp import are_tiled, tile_blocks
from upweight.models.memory import smaller_rows
from upweight.models.modules import unwrap_peft
from upweight.models.reference import Reference
from upweight.train.distill.teachers import Teachers, alignment_metrics
from upweight.train.distributed.ranks import all_gather_objects, union_over_ranks
from upweight.train.experts.balance import RouterBalance
from upweight.train.experts.replay import replay_metrics
from upweight.train.packed_rows import PackedRow, RowPacker
from upweight.train.recording.by_source import losses_by_source
from upweight.train.recording.metrics import Meters, sum_dtype
from upweight.train.row_check import RowCheck
from upweight.types import Loss, Mean, Metrics, Outputs, Unit


@dataclass
class StepRunner:
    """Packs a step into rows, forwards them, and divides losses by the counts of the whole step over all ranks."""

    method: Method
    engine: Engine
    accelerator: Accelerator
    token_budget: int
    reference: Reference | None = None
    dtype: torch.dtype = torch.float32  # of forwards
    temperature: float = 1.0  # of sampling; log-probs of completions use the same
    skip_zero_advantage: bool = False  # do not forward samples without a gradient
    teachers: Teachers | None = None
    router_coefficient: float = 0.0  # of the load-balancing loss of a mixture of experts
    meters: Meters = field(default_factory=Meters)
    tokens: int = 0  # forwarded by this rank since the last log
    collects: list[str] = field(default_factory=list)  # names that `Method.collect` returns on any rank
    sources: Sequence[str] = ()  # names of the datasets that a feed mixes

    def __post_init__(self) -> None:
        context = self.engine.context
        self._reports = context is None or context.rank == 0  # for its context-parallel group
        self._under_zero = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        several = self.teachers is not None and self.teachers.several
        balanced, loss = self.router_coefficient > 0, self.engine.router_loss
        self.packer = RowPacker(self.method, self.engine, self.accelerator, self.temperature, several, balanced)
        self.balance: RouterBalance | None = None
        if balanced and loss is not None:
            shared = self.packer.context_size
            self.balance = RouterBalance(self.router_coefficient, loss.top_k, self.accelerator, shared)
        whole = not (self.accelerator.is_fsdp2 or self._under_zero)
        self.row_check = RowCheck(self.packer, self.dtype, gradients=whole)

    def train(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        known_counts: Mapping[str, float] | None = None,
        sources: Sequence[int] | None = None,  # of the units, by number
    ) -> Tensor:
        """Compute the gradients of a step; return a loss whose mean over ranks is the loss of the step."""
        units = self._aligned(units)
        counts = self._step_counts(units, known_counts or {})  # known: denominators over a whole rollout
        forwarded = units
        if self.skip_zero_advantage and self.balance is None:  # all tokens count where routers are balanced
            forwarded = [unit for unit in units if any(map(self.method.contributes, unit.samples))]
        rows = self.packer.rows(forwarded, self.token_budget) or [PackedRow(self.packer.batch([]), ())]
        ref_logps, prepared = self._prepare(model, rows, self.balance)
        first = self.row_check.checked is None
        if checks := self.row_check.needed(forwarded):
            self.row_check.compare(model, rows, forwarded)
        total = torch.zeros((), device=self.accelerator.device)
        metered: list[Metrics] = []
        for number, row in enumerate(self._taught(model, rows, forwarded)):
            # With sharded weights, gradients are reduced after each row: a rank may not have room for all of them.
            last = number == len(rows) - 1
            at_once = last or self.accelerator.is_fsdp2 or self._under_zero
            if self._under_zero:  # DeepSpeed steps in the last backward
                self.accelerator.sync_gradients = last
            with contextlib.nullcontext() if at_once else self.accelerator.no_sync(model):
                out = self._row_outputs(model, row, ref_logps[number], routers=self.balance is not None)
                loss, metrics = self._packed_loss(out, row, counts, prepared)
                if self.balance is not None:
                    loss = loss + self.balance.row_loss(out) * self.accelerator.num_processes
                self.accelerator.backward(loss)
            metered += [metrics, replay_metrics(out)]
            total += loss.detach() / self.packer.context_size
            if sources is not None and len(self.sources) > 1 and row.unit_numbers:
                names = {number: self.sources[sources[number]] for number in row.unit_numbers}
                metered.append(losses_by_source(self.method, out, row, forwarded, prepared=prepared, names=names))
        if checks and first and not self._under_zero:  # DeepSpeed keeps gradients elsewhere
            flows = any(all_gather_objects(gradients_flow(model)))
            scored = all(float(count) > 0 for count in counts.values())
            # Pairs of one answer twice have no gradient, and the first step may have no others.
            if not flows and scored and any(all_gather_objects(any(map(_differs, forwarded)))):
                zero = not any(all_gather_objects(bool(total)))
                require_gradients(False, self.method.why_zero if zero else None)
        # Only now, so that a step that ran out of memory can be retried.
        self._add_metrics(metered, len(forwarded), len(units))
        self.tokens += sum(row.batch.ids_BN.numel() for row in rows if row.unit_numbers and self._reports)
        return total

    def give_up(
        self, model: nn.Module, units: Sequence[Unit], release_sampler: Callable[[], bool] | None
    ) -> str | None:
        """Have the next try of a step that ran out of memory need less; return what is given up, None where nothing is.

        All of it costs time only: no rung changes what is computed.
        """
        unwrapped = self.accelerator.unwrap_model(model)
        parts = [
            "the sampler's memory" if release_sampler is not None and release_sampler() else "",
            "kept activations" if recompute_every_layer(unwrap_peft(unwrapped)) else "",
        ]
        if any(parts):
            return " and ".join(filter(None, parts))
        largest_unit = max(sum(len(sample.ids) for sample in unit.samples) for unit in units)
        smaller = smaller_rows(self.token_budget, self.packer.largest, largest_unit)
        if smaller is not None:
            self.token_budget = smaller
            if are_tiled(unwrapped):
                tile_blocks(unwrapped, smaller)
            return f"larger rows (token_budget is now {smaller})"
        key = None if self.engine.images is not None else save_less(unwrapped, self.packer.largest)
        return None if key is None else f"speed ('{key}' from now on)"

    def _add_metrics(self, metered: Sequence[Metrics], forwarded: int, units: int) -> None:
        """Add the metrics of a step's rows, those of its routers, and how many of its units were forwarded."""
        for metrics in [*metered, *([] if self.balance is None else [self.balance.metrics()])]:
            self.meters.add(metrics)
        if self.skip_zero_advantage:
            parts = {"forwarded_share": (forwarded, units), "skipped_zero_adv_batches": (not forwarded, 1)}
            device = self.accelerator.device
            for name, part in parts.items():
                self.meters.add(
                    {name: Mean(*torch.tensor(part, dtype=sum_dtype(device)).to(device, non_blocking=True))}
                )

    def _step_counts(self, units: Sequence[Unit], known: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the counts of the whole step, which every rank holds."""
        counts = self.method.count(count_batch(units, self.method.head == "tokens"))
        counts |= {name: torch.tensor(float(known[name])) for name in counts if name in known}
        # Without waiting for the GPU, which still works on the step before.
        moved = torch.stack(list(counts.values())).to(self.accelerator.device, non_blocking=True)
        return dict(zip(counts, moved.unbind(), strict=True))

    def _prepare(
        self, model: nn.Module, rows: Sequence[PackedRow], balance: RouterBalance | None = None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Return each row's reference log-probs, if computed, and what the method prepares from the whole step."""
        if balance is not None:
            balance.start()
        if not self.method.needs_preparation:
            if balance is not None and len(rows) > 1:  # a single row counts the choices of its experts itself
                self._count_choices(model, rows, balance)
            return [None] * len(rows), {}
        collected: dict[str, list[Tensor]] = {}
        ref_logps: list[Tensor | None] = []
        with torch.no_grad():
            for row in rows:
                out = self._row_outputs(model, row, None, routers=balance is not None)
                if balance is not None:
                    balance.count(out)
                ref_logps.append(out.ref_logps_T)
                if row.unit_numbers:
                    for name, values in self.method.collect(out, row.batch).items():
                        collected.setdefault(name, []).append(values.float())
        if balance is not None:
            balance.finish_count()
        return ref_logps, self.method.prepare(self._join_ranks(collected))

    @torch.no_grad()
    def _count_choices(self, model: nn.Module, rows: Sequence[PackedRow], balance: RouterBalance) -> None:
        """Count how often each expert is chosen in the step, by a pass over the body alone."""
        for row in rows:
            balance.count(self.engine(model, row.batch, head=False, routers=True, replay=self.engine.replay))
        balance.finish_count()

    def _aligned(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return the units with their texts in the tokens of teachers with another tokenizer."""
        if self.teachers is None or not self.teachers.align or not self.method.evaluates_loss:
            return units
        aligned = self.teachers.aligned(units, keep=self.method.reads_untaught)
        self.meters.add(alignment_metrics(units, aligned, self.accelerator.device))
        return aligned

    def _taught(self, model: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> Iterable[PackedRow]:
        """Return the rows with what their scored tokens are compared with, where the loss compares them."""
        compares = self.teachers is not None and self.method.evaluates_loss
        return self.teachers.taught(model, rows, units) if self.teachers is not None and compares else rows

    def _row_outputs(
        self, model: nn.Module, row: PackedRow, ref_logps_T: Tensor | None, *, routers: bool = False
    ) -> Outputs:
        """Return the policy's outputs of a row with the reference log-probs."""
        batch = row.batch
        known = batch.ref_logps_T if batch.ref_logps_T is not None else ref_logps_T
        if known is None and self.reference is not None:
            with torch.no_grad(), self.reference.use(model) as reference:
                known = self.engine(reference, batch, temperature=row.temperature).logps_T
        given = {"teacher": row.teacher, "divergence": self.method.comparison, "routers": routers}
        given["replay"] = self.engine.replay
        out = self.engine(model, batch, self.method.statistics, temperature=row.temperature, **given)
        return out if known is None else dataclasses.replace(out, ref_logps_T=known)

    def _packed_loss(
        self, out: Outputs, row: PackedRow, counts: dict[str, Tensor], prepared: dict[str, Tensor]
    ) -> tuple[Tensor, Metrics]:
        """Return this row's part of the loss, times the number of ranks, which average gradients; and its metrics."""
        if not row.unit_numbers:
            return required(out.scores_TC if out.logps_T is None else out.logps_T).sum() * 0.0, {}
        loss = self.method.loss(out, row.batch, prepared)
        if loss.sums.keys() != counts.keys():
            problem = f"count() has {sorted(counts)}, and the loss is summed by {sorted(loss.sums)}"
            raise UserError(f"rl: '{self.method.name}': {problem}: the names must be the same.")
        parts = [total / counts[name].clamp(min=1) for name, total in loss.sums.items()]
        return torch.stack(parts).sum() * self.accelerator.num_processes, loss.metrics

    @torch.no_grad()
    def evaluate(self, model: nn.Module, units: Sequence[Unit]) -> tuple[Loss, dict[str, Tensor]]:
        """Return the loss sums of a step over all ranks, without gradients, and the counts to divide them by."""
        units = self._aligned(units)
        rows = self.packer.rows(units, self.token_budget)
        counts = self._step_counts(units, {})
        ref_logps, prepared = self._prepare(model, rows)
        sums = {name: torch.zeros_like(count) for name, count in counts.items()}
        for number, row in enumerate(self._taught(model, rows, units)):
            out = self._row_outputs(model, row, ref_logps[number])
            if row.unit_numbers:
                loss = self.method.loss(out, row.batch, prepared)
                self.meters.add(loss.metrics)
                sums = {name: total + loss.sums[name].float() for name, total in sums.items()}
        reduced = self.accelerator.reduce(torch.stack(list(sums.values())) * self._reports, "sum")
        assert isinstance(reduced, Tensor)
        return Loss(dict(zip(sums, reduced.unbind(), strict=True))), counts

    @contextlib.contextmanager
    def other_meters(self) -> Iterator[Meters]:
        """Inside, metrics go to other meters than those of training."""
        training, self.meters = self.meters, Meters()
        try:
            yield self.meters
        finally:
            self.meters = training

    @torch.no_grad()
    def logps(
        self, model: nn.Module, units: Sequence[Unit], engine: Engine | None = None, *, replays: bool = False
    ) -> list[list[NDArray[np.float32]]]:
        """Return the log-probs of each unit's scored tokens on every rank; zero for the first token of a sequence.

        `engine`: that of a model which is not the policy; `replays`: with the experts of the sampler, for the policy.
        """
        rank_logps: dict[int, list[NDArray[np.float32]]] = {}
        engine = engine or self.engine
        for row in dataclasses.replace(self.packer, engine=engine).rows(units, self.token_budget):
            replay = engine.replay if replays else None
            logps_T = engine(model, row.batch, temperature=row.temperature, replay=replay).logps_T
            assert logps_T is not None
            samples = [sample for number in row.unit_numbers for sample in units[number].samples]
            counts = np.bincount(row.batch.sequence_T.cpu().numpy(), minlength=len(samples))
            parts = iter(np.split(logps_T.float().cpu().numpy(), np.cumsum(counts)[:-1]))
            for number in row.unit_numbers:
                pairs = [(int(sample.loss_mask.sum()), next(parts)) for sample in units[number].samples]
                rank_logps[number] = [np.pad(part, (scored - len(part), 0)) for scored, part in pairs]
        gathered = all_gather_objects(rank_logps if self._reports else {})
        logps = {number: parts for of_rank in gathered for number, parts in of_rank.items()}
        return [logps[number] for number in range(len(units))]

    def _join_ranks(self, collected: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Concatenate the values of all rows and ranks; ranks pad with NaN to the longest."""
        if self.accelerator.num_processes == 1:
            return {name: torch.cat(values) for name, values in collected.items()}
        if not self.collects:  # the same in every step
            self.collects = union_over_ranks(set(collected))
        joined: dict[str, Tensor] = {}
        for name in self.collects:
            nothing = [torch.zeros(0, device=self.accelerator.device)]
            values = torch.cat(collected.get(name, nothing) if self._reports else nothing)
            padded = self.accelerator.pad_across_processes(values, pad_index=float("nan"))  # pyright: ignore[reportArgumentType]
            gathered = self.accelerator.gather(padded)
            assert isinstance(gathered, Tensor)
            joined[name] = gathered[~gathered.isnan()]
        return joined


def _differs(unit: Unit) -> bool:
    """Return whether a unit is anything but a pair of one sequence twice."""
    first, *others = unit.samples
    return len(others) != 1 or not np.array_equal(first.ids, others[0].ids)
