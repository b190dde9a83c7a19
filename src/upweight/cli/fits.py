"""`upweight fits`: which ways of training a config's model fit on a card."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from upweight.cli.inputs import read_config
from upweight.config import Config, parse_config
from upweight.config.yaml_file import apply_overrides
from upweight.errors import UserError
from upweight.models.memory import (
    GIB,
    USABLE_SHARE,
    Memory,
    TrainedWeights,
    estimate,
    keeps_start,
    longest,
    shape_of,
    teacher_bytes,
)
from upweight.models.memory_plan import longest_row

TRAINED_KINDS: tuple[TrainedWeights, ...] = ("all", "lora", "qlora")
HEADINGS = ("trained", "recompute", "weights", "training", "activations", "total", "fits", "longest")
CHOSEN = {"sft": "{}", "reward": "reward_model: true", "prm": "process_reward_model: true"}  # others by `rl`


class Way(NamedTuple):
    """A way of training, and what it needs."""

    trained: TrainedWeights
    recompute: bool
    need: Memory
    fits: bool
    longest: int  # tokens of a sequence that fit


def run(target: str, overrides: list[str], *, memory: float | None, method: str | None = None) -> None:
    """Print one line for each way of training: GiB by part, whether it fits, the longest sequence; then advice."""
    config = _config_of(target, overrides, method)
    if memory is None:
        if not torch.cuda.is_available():
            raise UserError("no GPU is visible here; say how much memory the card has, in GiB: --memory 24")
        memory = torch.cuda.mem_get_info()[1] / GIB
    ways = _estimates(config, memory * GIB)
    print("\n".join([*_table(config, ways, memory), "", _advice(config, ways, memory)]))


def _config_of(target: str, overrides: list[str], method: str | None) -> Config:
    """Return the config in a file, or that of a model alone, which a LoRA trains by a method."""
    path = Path(target).expanduser()
    if (path.is_file() and path.suffix != ".gguf") or path.suffix in (".yaml", ".yml"):
        if method is not None:
            raise UserError("--method: the config chooses the method; leave it out, or set it: rl=NAME")
        return read_config(path, overrides)
    chosen = CHOSEN.get(method or "sft") or f"rl: {method}"
    content = {"base_model": target, "adapter": "lora", "lora_target_linear": True, **yaml.safe_load(chosen)}
    return parse_config(apply_overrides(content, overrides), folder=Path.cwd(), fragment=True)


def _estimates(config: Config, card: float) -> list[Way]:
    """Return the ways of training, those that change least first."""
    shape = shape_of(config.model, config.method.head)
    sequences = 2 if config.method.data == "pairs" else 1
    sharing = config.sharding.context_parallel_size
    need_of = partial(
        estimate, shape, adapter=config.adapter, optimizer=config.optim.optimizer, reference=keeps_start(config),
        tokens=-(-longest_row(config)[0] * sequences // sharing), teachers=teacher_bytes(config),
        offload=config.optim.reference_offloading,
    )  # fmt: skip
    ways = []
    for trained in TRAINED_KINDS:
        for recompute in (False, True):
            need = need_of(trained, checkpointing=recompute)
            most = longest(shape, need, card, checkpointing=recompute, sequences=sequences) * sharing
            ways.append(Way(trained, recompute, need, need.total <= USABLE_SHARE * card, most))
    return ways


def _is_configured(config: Config, way: Way) -> bool:
    return (way.trained, way.recompute) == (config.adapter.kind or "all", config.optim.gradient_checkpointing)


def _table(config: Config, ways: Sequence[Way], memory: float) -> list[str]:
    """Return the estimates as lines; the config's setting is marked."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for way in ways:
        need = way.need
        parts = [f"{part / GIB:.1f}" for part in (need.weights, need.training, need.activations, need.total)]
        mark, fits = "* " if _is_configured(config, way) else "", "yes" if way.fits else "no"
        rows.append((mark + way.trained, "yes" if way.recompute else "no", *parts, fits, str(way.longest)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    parameters, teachers = shape_of(config.model, config.method.head).parameters, teacher_bytes(config)
    what = f"{parameters / 1e9:.2f} billion weights, {config.method.name}, {longest_row(config)[0]} tokens"
    beside = f", teachers of {teachers / GIB:.1f} GiB" if teachers else ""
    sequences = 2 if config.method.data == "pairs" else 1
    about = f"{what}{beside}, {sequences} in a row; GiB of {memory:.0f}, bfloat16; * is this config"
    return [about, *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)]


def _advice(config: Config, ways: Sequence[Way], memory: float) -> str:
    """Return in one line whether the config fits, and which keys change that."""
    now = next((way for way in ways if _is_configured(config, way)), ways[0])
    tokens, keys = longest_row(config)
    if now.fits:
        return f"It fits: {now.need.total / GIB:.1f} GiB of {memory:.0f}; up to {now.longest} tokens do ({keys})."
    start = f"It does not fit: {now.need.total / GIB:.1f} GiB of {memory:.0f}."
    later = ways[ways.index(now) :]
    if (way := next((way for way in later if way.fits), None)) is not None:
        return f"{start} It does with {_keys_of(way, now)}."
    way = max(later, key=lambda one: one.longest)
    if way.longest > 0:
        changed = " and ".join(
            filter(None, (_keys_of(way, now), f"{way.longest} tokens in place of {tokens} ({keys})"))
        )
        return f"{start} It does with {changed}."
    return (
        f"{start} No way of training it on one such card does: take a smaller model, or 'fsdp: true' over more cards."
    )


def _keys_of(way: Way, now: Way) -> str:
    """Return the keys that make one way of training another."""
    keys = [f"'adapter: {way.trained}'"] if way.trained != now.trained else []
    keys += ["'load_in_4bit: true'"] if way.trained == "qlora" != now.trained else []
    keys += ["'gradient_checkpointing: true'"] if way.recompute and not now.recompute else []
    return ", ".join(keys)
