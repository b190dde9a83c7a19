"""The memory that a config's training is estimated to need, beside what the device has."""

from dataclasses import dataclass

import psutil
import torch

from upweight.config import Config
from upweight.models.load import compute_dtype
from upweight.models.memory import (
    GIB,
    HEAD_CHUNK,
    USABLE_SHARE,
    Memory,
    estimate,
    keeps_start,
    shape_of,
    teacher_bytes,
)

USUAL_PROMPT = 512  # tokens, where max_prompt_length does not bound prompts


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


def longest_row(config: Config) -> tuple[int, str]:
    """Return the tokens of the longest sequence that a config allows, and the keys that decide it."""
    online = config.method.online_settings
    if online is None:
        return config.data.sequence_len, "sequence_len"
    prompt = config.data.max_prompt_length or USUAL_PROMPT
    return online.max_completion_length + prompt, "trl.max_completion_length and max_prompt_length"


def plan_memory(config: Config) -> MemoryPlan:
    """Estimate from the model's shape; compare with the GPU's memory, or with the host's where there is no GPU."""
    # The tokens of the smallest possible forward: one row of the data at its longest.
    tokens = longest_row(config)[0] * (2 if config.method.data == "pairs" else 1)
    need = estimate(
        shape_of(config.model, config.method.head),
        config.adapter.kind or "all",
        config.adapter,
        optimizer=config.optim.optimizer,
        reference=keeps_start(config),
        checkpointing=config.optim.gradient_checkpointing,
        tokens=tokens,
        teachers=teacher_bytes(config),
        offload=config.optim.reference_offloading,
    )
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    width = compute_dtype(config.model, device).itemsize / 2  # the estimate assumes two bytes per value
    shards = torch.cuda.device_count() if on_gpu and config.sharding.fsdp else 1
    activations = need.activations * (width if need.activations > HEAD_CHUNK else 1)
    available = USABLE_SHARE * torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().available
    shared = Memory(need.weights * width / shards, need.training / shards, activations)
    return MemoryPlan(shared, available, "the GPU" if on_gpu else "this machine")
