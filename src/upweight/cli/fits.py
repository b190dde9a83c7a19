"""`upweight fits`: which ways of training a config's model fit on a card."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from upweight.cli.inputs import read_config
from upweight.config import Config
from upweight.errors import UserError
from upweight.models.memory import (
    GIB,
    USABLE_SHARE,
    Savings,
    TrainedWeights,
    estimate,
    keeps_start,
    longest,
    shape_of,
    teacher_bytes,
    total_memory,
)

TRAINED_KINDS: tuple[TrainedWeights, ...] = ("all", "lora", "qlora")
HEADINGS = ("trained", "recompute", "weights", "training", "activations", "total", "fits", "longest")


def run(path: Path, overrides: list[str], *, memory: float | None) -> None:
    """Print one line for each way of training: GiB by part, whether it fits, and the longest sequence that fits."""
    config = read_config(path, overrides)
    if memory is None:
        if not torch.cuda.is_available():
            raise UserError("no GPU is visible here; say how much memory the card has, in GiB: --memory 24")
        memory = total_memory(torch.device("cuda")) / GIB
    print("\n".join(table(config, memory * GIB)))


def table(config: Config, card: float) -> list[str]:
    """Return the estimates as lines; the config's setting is marked."""
    shape = shape_of(config.model, config.method.head)
    sequences = 2 if config.method.data == "pairs" else 1
    sharing = config.sharding.context_parallel_size
    tokens = -(-config.data.sequence_len * sequences // sharing)
    configured = (config.adapter.kind or "all", config.optim.gradient_checkpointing)
    teachers = teacher_bytes(config)
    need_of = partial(
        estimate, shape, adapter=config.adapter, optimizer=config.optim.optimizer, reference=keeps_start(config),
        tokens=tokens, teachers=teachers,
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [HEADINGS]
    for trained in TRAINED_KINDS:
        for recompute in (False, True):
            savings = replace(Savings.of(config), recompute=recompute)
            need = need_of(trained, savings=savings)
            parts = [f"{part / GIB:.1f}" for part in (need.weights, need.training, need.activations, need.total)]
            fits = "yes" if need.total <= USABLE_SHARE * card else "no"
            most = longest(shape, need, card, savings=savings, sequences=sequences) * sharing
            mark = "* " if (trained, recompute) == configured else ""
            rows.append((mark + trained, "yes" if recompute else "no", *parts, fits, str(most)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    what = f"{shape.parameters / 1e9:.2f} billion weights, {config.method.name}, {config.data.sequence_len} tokens"
    beside = f", teachers of {teachers / GIB:.1f} GiB" if teachers else ""
    about = f"{what}{beside}, {sequences} in a row; GiB of {card / GIB:.0f}, bfloat16; * is this config"
    return [about, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]
