"""Packs the units of a step into rows, one forward each, and divides them over ranks by their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from accelerate import Accelerator
from accelerate.utils import DistributedType

from upweight.engine import Engine
from upweight.engine.divergences import Teacher
from upweight.engine.images import with_blank_image
from upweight.engine.packing import build_batch, plan_rows, row_tokens, whole_blocks
from upweight.methods.base import Method
from upweight.rollout.units import DEMONSTRATION
from upweight.types import Batch, Unit


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed forward of this rank; without units it only keeps collectives aligned with the other ranks."""

    batch: Batch
    unit_numbers: tuple[int, ...]
    temperature: float = 1.0
    teacher_name: str | None = None
    teacher: Teacher | None = None  # what its scored tokens are compared with


@dataclass
class RowPacker:
    """Packs rows for one rank, or for one context-parallel group of ranks."""

    method: Method
    engine: Engine
    accelerator: Accelerator
    temperature: float = 1.0  # of sampling; log-probs of completions use the same
    by_teacher: bool = False  # whether rows hold the units of one teacher
    weighs: bool = False  # whether tokens are weighted for the load-balancing loss of routers
    largest: int = 0  # tokens of the largest row of the last plan, on any rank
    runs_tower: bool = False  # whether rows without an image run the vision tower, as those of other ranks do

    def __post_init__(self) -> None:
        self._under_zero = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.context_size = 1 if self.engine.context is None else self.engine.context.size
        self.data_parallel_size = self.accelerator.num_processes // self.context_size

    def rows(self, units: Sequence[Unit], token_budget: int) -> list[PackedRow]:
        """Return this rank's packed rows; every rank has the same number, of which some are empty."""
        # Shards of a tower are gathered, and its gradients reduced, by all ranks or none. In a step without gradients
        # ZeRO-3 would take those of the last one again: once there were images, every row runs the tower.
        if self.accelerator.is_fsdp2 or self._under_zero:
            has_images = any(sample.images for unit in units for sample in unit.samples)
            self.runs_tower = has_images or (self._under_zero and self.runs_tower)
        # Demonstrations are packed apart: they were not sampled, so their temperature is 1.
        marks = [
            (self.method.online and unit.samples[0].label == DEMONSTRATION, unit.teacher if self.by_teacher else None)
            for unit in units
        ]
        rows: list[PackedRow] = []
        self.largest = 0
        for mark in sorted(set(marks), key=str):
            numbers = [number for number, one in enumerate(marks) if one == mark]
            temperature = 1.0 if mark[0] else self.temperature
            chosen = [units[number] for number in numbers]
            plan = plan_rows(chosen, token_budget, self.data_parallel_size, self.engine.layout)
            # the first rank's first row is the largest
            self.largest = max(self.largest, row_tokens([chosen[n] for n in plan[0][0]], self.engine.layout))
            rows += [
                PackedRow(self.batch([chosen[n] for n in row]), tuple(numbers[n] for n in row), temperature, mark[1])
                for row in plan[self.accelerator.process_index // self.context_size]
            ]
        return rows

    def batch(self, units: Sequence[Unit]) -> Batch:
        """Return the tensors of one row on this rank's device."""
        device = self.accelerator.device
        pad_to = whole_blocks if device.type == "cuda" else None
        weighs = self.method.counts_for_routers if self.weighs else None
        batch = build_batch(units, self.engine.layout, self.method.head == "tokens", pad_to, weighs).to(device)
        return with_blank_image(batch) if self.runs_tower else batch
