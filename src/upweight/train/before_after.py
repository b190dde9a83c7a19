"""What an online run has learned: held-out rewards before the first step against those after the last."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from upweight.log import logger
from upweight.train.run_files import metrics_of

SHOWN = r"(eval.*?)_(reward|rewards/.+/(?:mean|pass@\d+)|completions/mean_length|completions/clipped_ratio)"


class BeforeAndAfter(TrainerCallback):
    """Evaluates after the last step and says what has changed since the first evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.evaluated = folder, -1

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = state.global_step >= state.max_steps
        if is_last and args.eval_strategy != "no" and self.evaluated != state.global_step:
            control.should_evaluate = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            for line in before_and_after(metrics_of(self.folder)):
                logger.info("%s", line)


def before_and_after(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each set's first evaluation against its last, from the rows of metrics.jsonl; nothing where there is one only."""
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        names = {match[1] for name in row if (match := re.fullmatch(SHOWN, name))}
        for name in sorted(names):
            sets.setdefault(name, []).append(row)
    lines = []
    for name, found in sets.items():
        first, last = found[0], found[-1]
        if first["step"] == last["step"]:
            continue
        of = name.removeprefix("eval").removeprefix("_")
        lines.append(f"held out{f' ({of})' if of else ''}, step {first['step']} -> {last['step']}:")
        changes = [_change(match[2], first.get(key), value) for key, value in last.items() if (match := _of(name, key))]
        width = max(len(metric) for metric, _ in changes)
        lines += [f"  {metric:<{width}}  {change}" for metric, change in changes]
    return lines


def _of(name: str, key: str) -> "re.Match[str] | None":
    match = re.fullmatch(SHOWN, key)
    return match if match and match[1] == name else None


def _change(metric: str, before: float | None, after: float) -> tuple[str, str]:
    return metric, f"{'-' if before is None else format(before, '.3g')} -> {after:.3g}"
