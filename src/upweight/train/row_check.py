"""Compares packed rows with plain forwards of the model: in the first step, and when rows become much longer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from upweight.engine.check import check_first_batch, check_first_gradients
from upweight.models.modules import refuse_ruined_weights
from upweight.train.distributed.ranks import all_gather_objects
from upweight.train.packed_rows import PackedRow, RowPacker
from upweight.types import Sample, Unit

RECHECK_GROWTH = 2  # a row is checked again when it is this many times longer than those checked before
MAX_GRADIENT_CHECK = 1024  # longest unit, in tokens, whose gradients are checked
LATER = (
    "They agreed in the first step, so training has most likely ruined the weights since: lower `learning_rate` and "
    "start again (`upweight doctor RUN` judges it). If it is usual already, longer sequences are at fault: "
)
EXCERPT_TOKENS = 256  # of a sample checked under context parallelism, where a whole one may not fit a rank


@dataclass
class RowCheck:
    """Decides which steps to check, on all ranks alike, and raises where a packed row differs from plain forwards."""

    packer: RowPacker
    dtype: torch.dtype  # of forwards
    gradients: bool = True  # whether ranks hold whole gradients, which are compared too
    checked: tuple[int, int] | None = None  # the longest sequence and the largest row that were checked
    agreed: bool = False  # whether an earlier step passed

    def needed(self, units: Sequence[Unit]) -> bool:
        """Whether to check a packed row: in the first step, and where a sequence or row is much longer than before."""
        # Some models change positions and scales beyond a length only. All ranks hold the whole step and decide alike.
        # Without an advantage there may be no gradient to check: at the start the KL has none either.
        compares = self.packer.method.needs_rewards
        scored = [sample for unit in units for sample in unit.samples if _is_scored(sample)]
        if not any(sample.advantage is None or sample.has_advantage or not compares for sample in scored):
            return False
        longest, before = max(len(sample.ids) for unit in units for sample in unit.samples), self.checked or (0, 0)
        largest = self.packer.largest
        # Ranks that share rows compare excerpts, which do not grow.
        grows = self.checked is None or self.packer.engine.context is None
        is_longer = grows and (longest >= RECHECK_GROWTH * before[0] or largest >= RECHECK_GROWTH * before[1])
        if is_longer:
            self.checked = max(longest, before[0]), max(largest, before[1])
        return is_longer

    def compare(self, model: nn.Module, rows: Sequence[PackedRow], units: Sequence[Unit]) -> None:
        """Compare the row with the longest sequence, on all ranks together, and the gradients of a short unit of it."""
        packer, engine = self.packer, self.packer.engine
        row = max(rows, key=lambda row: int(row.batch.position_BN.max()) if row.unit_numbers else -1)
        scored = [unit for unit in (units[number] for number in row.unit_numbers) if any(map(_is_scored, unit.samples))]
        batch = row.batch if scored else packer.batch([])
        if engine.context is not None:
            scored = [_excerpt(unit) for unit in scored[:2]]
            batch = packer.batch(scored)
        checks = [check_first_batch(engine, model, batch, self.dtype)]
        if self.gradients:
            short = [unit for unit in scored if sum(len(sample.ids) for sample in unit.samples) <= MAX_GRADIENT_CHECK]
            plain = packer.accelerator.unwrap_model(model)
            checks.append(check_first_gradients(engine, plain, packer.batch(short[:1]), self.dtype))
        worst = torch.tensor(all_gather_objects([check.difference for check in checks])).amax(0)
        if not self.agreed and not bool(worst.isfinite().all()):
            refuse_ruined_weights(model)
        for check, difference in zip(checks, worst.tolist(), strict=True):
            advice = LATER + check.advice[:1].lower() + check.advice[1:] if self.agreed else check.advice
            dataclasses.replace(check, difference=difference, advice=advice).require()
        self.agreed = True


def _is_scored(sample: Sample) -> bool:
    return bool(sample.loss_mask[1:].any())


def _excerpt(unit: Unit) -> Unit:
    """Cut each sample of a unit to the tokens around its first scored one."""
    samples: list[Sample] = []
    for sample in unit.samples:
        first = int(sample.loss_mask.argmax())
        around = slice(max(0, first - EXCERPT_TOKENS // 2), first + EXCERPT_TOKENS // 2)
        samples.append(Sample(ids=sample.ids[around], loss_mask=sample.loss_mask[around]))
    return Unit(tuple(samples))
