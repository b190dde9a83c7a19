"""The memory that a config's training is estimated to need, beside what the device has."""

from dataclasses import dataclass

import torch

from upweight.config import Config
from upweight.models.load import compute_dtype
from upweight.models.memory import (
    GIB,
    HEAD_CHUNK,
    USABLE_SHARE,
    Memory,
    Savings,
    estimate,
    free_memory,
    keeps_start,
    shape_of,
    teacher_bytes,
    total_memory,
)


@dataclass(frozen=True)
class MemoryPlan:
    """An estimate of one device's memory, and what is there for it."""

    need: Memory
    available: float
    where: str

    @property
    def fits(self) -> bool:
        return self.need.total <= self.available

    def line(self) -> str:
        """Say both in GiB, the need by its parts."""
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in vars(self.need).items())
        room = f"{self.where} has {self.available / GIB:.1f} available"
        return f"about {self.need.total / GIB:.1f} GiB ({parts}); {room}"


def plan_memory(config: Config) -> MemoryPlan:
    """Estimate from the model's shape; compare with the GPU's memory, or with the host's where there is no GPU."""
    online = config.method.online_settings
    # The tokens of the smallest possible forward: one row of the data at its longest.
    tokens = config.data.sequence_len * (2 if config.method.data == "pairs" else 1)
    if online is not None:
        tokens = online.max_completion_length + (config.data.max_prompt_length or 512)
    need = estimate(
        shape_of(config.model, config.method.head),
        config.adapter.kind or "all",
        config.adapter,
        optimizer=config.optim.optimizer,
        reference=keeps_start(config),
        tokens=tokens,
        savings=Savings.of(config),
        teachers=teacher_bytes(config),
    )
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    width = compute_dtype(config.model, device).itemsize / 2  # the estimate assumes two bytes per value
    shards = torch.cuda.device_count() if on_gpu and config.sharding.fsdp else 1
    activations = need.activations * (width if need.activations > HEAD_CHUNK else 1)
    available = USABLE_SHARE * total_memory(device) if on_gpu else free_memory(device)
    shared = Memory(need.weights * width / shards, need.training / shards, activations)
    return MemoryPlan(shared, available, "the GPU" if on_gpu else "this machine")
