"""What a run says before its first step: model, batch, device, memory, steps, and where to look."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from upweight.config import Config
from upweight.config.resolve import memory_settings
from upweight.config.rules.training import WITHOUT_WARMUP, long_warmup, warmup_is_long, warmup_text
from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.log import counted, logger
from upweight.models.memory_plan import plan_memory
from upweight.models.modules import unwrap_peft
from upweight.runs.files import METRICS
from upweight.train.distributed.deepspeed import without_zero3

ROWS_MEASURED = 64  # of the training rows, for the tokens of a step


class StartSummary(TrainerCallback):
    """Logs the summary when training begins."""

    def __init__(self, config: Config, trainer: Any) -> None:
        self.config, self.trainer = config, trainer
        with without_zero3(trainer):  # the estimate builds a model without weights
            self.memory = _memory(config)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            for name, text in summary(self.config, self.trainer, state, self.memory):
                logger.info("%-8s %s", name, text)
            steps, warmup = state.max_steps, _warmup_steps(self.trainer, state.max_steps)
            if warmup_is_long(warmup, steps) and not any(long_warmup(self.config)):  # which has been said
                logger.warning("warning: %s", warmup_text(warmup, steps))


def summary(config: Config, trainer: Any, state: Any, memory: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts, one a line."""
    yield "model", _model(config, trainer)
    yield "batch", _batch(config, trainer)
    yield "device", _device(trainer)
    if memory:
        yield "memory", memory
    yield "steps", _steps(trainer, state)
    folder = Path(config.run.output_dir)
    yield "look", f"upweight watch {shlex.quote(str(folder))}  (or --text in a terminal); metrics in {folder / METRICS}"


def _model(config: Config, trainer: Any) -> str:
    """The base model, the method, and how many of its weights are trained."""
    model = trainer.model
    trained = sum(_numel(weight) for weight in model.parameters() if weight.requires_grad)
    total = sum(_numel(weight) for weight in model.parameters())
    adapter = f" ({config.adapter.kind}, rank {config.adapter.rank})" if config.adapter.kind else ""
    name = config.model.base_model or unwrap_peft(model).config.name_or_path
    dtype = str(trainer.runner.dtype).removeprefix("torch.")
    share = f"{trained / max(total, 1):.2%}" if trained < total else "all"
    weights = f"trains {_count(trained)} of {_count(total)} weights ({share}), {dtype}"
    return f"{name}, {config.method.label}{adapter}: {weights}"


def _numel(weight: Any) -> int:
    """The numbers of a weight; ZeRO-3 leaves an empty one that knows its whole size."""
    return int(getattr(weight, "ds_numel", 0) or weight.numel())


def _batch(config: Config, trainer: Any) -> str:
    """What one optimizer step trains on, over all ranks."""
    size = trainer.args.per_device_train_batch_size * trainer.args.world_size
    if trainer.rollouts is not None:
        plan, online = trainer.rollouts.producer.plan, config.method.online_settings
        most = online.max_completion_length if online else 0
        groups = f"{counted(plan.groups, 'prompt')} x {counted(plan.group_size, 'completion')}"
        sampled = f"{groups} of up to {counted(most, 'token')} in a rollout"
        return f"{plan.step_size} completions a step, up to {plan.step_size * most:,} tokens of them; {sampled}"
    row = {"pairs": "pair", "prompts": "prompt"}.get(config.method.data, "row")
    tokens = _tokens_of_row(trainer)
    there = size if trainer.feed is not None else min(len(trainer.train_rows), size)
    fewer = f", all that there are (the config allows {size})" if there < size else ""
    return f"{counted(there, row)} a step{fewer}" + (f", about {tokens * there:,.0f} tokens" if tokens else "")


def _tokens_of_row(trainer: Any) -> float:
    """The mean number of tokens of some rows, spread over the data; 0 where rows are streamed."""
    if trainer.feed is not None:
        return 0.0
    rows = trainer.train_rows
    chosen = range(0, len(rows), max(len(rows) // ROWS_MEASURED, 1))
    lengths = [
        sum(len(sample.ids) for unit in units_of([rows[number]], trainer.method) for sample in unit.samples)
        for number in chosen
    ]
    return sum(lengths) / max(len(lengths), 1)


def _device(trainer: Any) -> str:
    device, ranks = trainer.args.device, trainer.args.world_size
    threads = counted(torch.get_num_threads(), "thread")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type.upper()}, {threads}"
    return f"{ranks} x {name}" if ranks > 1 else name


def _steps(trainer: Any, state: Any) -> str:
    """How many steps, over how many rows, and what is done between them."""
    args, rows = trainer.args, None if trainer.feed is not None else len(trainer.train_rows)
    parts = [f"{state.max_steps:,}" + (f", from step {state.global_step} on" if state.global_step else "")]
    parts += [counted(rows, "row")] if rows is not None else []
    if warmup := _warmup_steps(trainer, state.max_steps):
        long = f"{warmup:,} steps, from a learning rate of 0 up" if warmup > 1 else "1 step, at a learning rate of 0"
        parts.append(f"warm-up: {long}")
    for what, strategy, every in (
        ("evaluates", args.eval_strategy, args.eval_steps),
        ("saves", args.save_strategy, args.save_steps),
    ):
        kind = getattr(strategy, "value", strategy)
        if kind != "no":
            parts.append(f"{what} every {_every(every, state.max_steps)}" if kind == "steps" else f"{what} each {kind}")
    return "; ".join(parts)


def _warmup_steps(trainer: Any, steps: int) -> int:
    """The steps of warm-up; a schedule of the user's may have another."""
    has_none = trainer.schedule is not None or trainer.args.lr_scheduler_type in WITHOUT_WARMUP
    return 0 if has_none else trainer.args.get_warmup_steps(steps)


def _every(every: float | None, steps: int) -> str:
    number = int(every * steps) if every and every < 1 else int(every or 1)
    return "step" if number <= 1 else f"{number} steps"


def _memory(config: Config) -> str:
    """The estimate beside what there is, and the keys that `memory` has set."""
    parts: list[str] = []
    with suppress(UserError):  # of a model that a script gave without a name
        plan = plan_memory(config)
        parts.append(plan.line() + ("" if plan.fits else ": it may not fit"))
    if chosen := memory_settings(config):
        keys = ", ".join(f"{path}: {str(value).lower() if value is True else value}" for path, value in chosen.items())
        parts.append(f"'memory: {config.optim.memory}' sets {keys}")
    return "; ".join(parts)


def _count(number: int) -> str:
    """A number of weights, as people say it."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
