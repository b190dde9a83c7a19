"""The one plan of a config's memory: what `fits`, the doctor and a run's start say that it needs and that is there."""

import sys
from dataclasses import dataclass
from functools import partial

import torch

from upweight.config import Config
from upweight.config.resolve import generation_batch, group_size
from upweight.config.sections.rollout import IN_PROCESS
from upweight.models.load import compute_dtype
from upweight.models.memory import (
    GIB,
    HALF_BYTES,
    Memory,
    Savings,
    Shape,
    TrainedWeights,
    adapts_blocks,
    estimate,
    free_memory,
    keeps_start,
    longest,
    sampler_bytes,
    shape_of,
    teacher_bytes,
    total_memory,
    usable,
)
from upweight.models.modules import GATED_PROJECTIONS

USUAL_PROMPT = 512  # tokens, where no key bounds them
MOST_SLOTS = 1024  # completions that are sampled at the same time


@dataclass(frozen=True)
class MemoryPlan:
    """An estimate of one device's memory, and what is there for it."""

    need: Memory
    available: float
    where: str
    longest: int = 0  # tokens that a sequence may have at most

    @property
    def fits(self) -> bool:
        return self.need.total <= self.available

    def line(self) -> str:
        """Say both in GiB, the need by its parts."""
        parts = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in vars(self.need).items() if size or name != "sampler"
        )
        room = f"{self.where} has {self.available / GIB:.1f} available"
        return f"about {self.need.total / GIB:.1f} GiB ({parts}); {room}"


@dataclass(frozen=True)
class ModelNeeds:
    """What the plans of a model share, whichever of its weights are trained."""

    shape: Shape
    teachers: float  # bytes of their weights

    @classmethod
    def of(cls, config: Config) -> "ModelNeeds":
        """Read the sizes of a config's model and teachers."""
        return cls(shape_of(config.model, config.method.head), teacher_bytes(config))


def trained_weights(config: Config) -> TrainedWeights:
    """Return which weights a config trains."""
    adapter = config.adapter
    if adapter.kind is None:
        return "all"
    return "qlora" if adapter.kind == "qlora" or adapter.load_in_4bit or adapter.load_in_8bit else "lora"


def row_tokens(config: Config) -> tuple[int, int]:
    """Return the tokens of the longest sequence that the settings allow, and how many share the smallest forward."""
    online = config.method.online_settings
    if online is not None:
        return online.max_completion_length + (config.data.max_prompt_length or USUAL_PROMPT), 1
    return config.data.sequence_len, 2 if config.method.data == "pairs" else 1


def plan_memory(
    config: Config,
    card: float | None = None,
    trained: TrainedWeights | None = None,
    model: ModelNeeds | None = None,
) -> MemoryPlan:
    """Estimate from the model's shape; compare with the GPU's memory, or with the host's where there is no GPU.

    `card`: bytes of a GPU to plan for, computing in half precision. `trained`: other weights than those of the config.
    """
    model, savings, trained = model or ModelNeeds.of(config), Savings.of(config), trained or trained_weights(config)
    in_8_bits = trained == "qlora" and config.adapter.load_in_8bit
    shape = model.shape.quantised() if in_8_bits else model.shape
    whole = not (config.sharding.fsdp or config.sharding.deepspeed) and model.shape.stored.bits is None
    if trained != "all" and whole and adapts_blocks(config.adapter):
        shape = shape.with_block_nodes()
    (length, sequences), sharing = row_tokens(config), config.sharding.context_parallel_size
    on_gpu = card is not None or torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    width = compute_dtype(config.model, device).itemsize / HALF_BYTES if card is None else 1.0
    counted = partial(
        estimate,
        shape,
        trained,
        config.adapter,
        optimizer=config.optim.optimizer,
        reference=keeps_start(config),
        savings=savings,
        teachers=model.teachers,
        number_bytes=HALF_BYTES * width,
    )
    need = counted(tokens=-(-length * sequences // sharing))
    passing = counted(tokens=0).activations  # of a reference or teachers in host memory, while they compute
    if card is None:
        card = float(total_memory(device) if on_gpu else free_memory(device))
        shards = torch.cuda.device_count() if on_gpu and config.sharding.fsdp else 1
        need = Memory(need.weights / shards, need.training / shards, need.activations * width)
    fixed = need.weights + need.training
    available = usable(card, fixed) if on_gpu else card
    held = _sampler_need(config, shape, width, available - fixed, card)
    need = Memory(need.weights, need.training, need.activations, held)
    most = longest(shape, need, available, savings=savings, sequences=sequences) * sharing
    if passing > available - fixed - held:  # no sequence is short enough
        most = 0
    most = min(int(most / width), shape.positions or sys.maxsize)
    return MemoryPlan(need, available, "the GPU" if on_gpu else "this machine", most)


def _sampler_need(config: Config, shape: Shape, width: float, free: float, card: float) -> float:
    """Return the bytes that sampling on this device holds while a step trains."""
    rollout = config.rollout
    if not config.method.online or rollout.release_sampler:
        return 0.0
    if rollout.backend != IN_PROCESS:
        beside = rollout.backend == "vllm_colocate" and not rollout.sleep_mode
        return rollout.colocate_memory * card if beside else 0.0
    completions = generation_batch(config)
    prompts = -(-completions // group_size(config))
    tokens = (min(completions, MOST_SLOTS) + prompts) * row_tokens(config)[0]
    named = (shape.modules.get(name, {}) for name in GATED_PROJECTIONS)
    copies = sum(sum(sizes.values()) for sizes in named) if rollout.sampler_quantization else 0  # a byte each
    return copies + min(tokens * shape.token.keys * width, sampler_bytes(free - copies))
