"""Compare held-out rewards before the first step of an online run with those after the last."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from upweight.log import logger
from upweight.runs.files import metrics_of
from upweight.runs.report.reading import columns
from upweight.runs.report.run import first_and_last


class BeforeAndAfter(TrainerCallback):
    """Evaluates after the last step and logs what has changed since the first evaluation."""

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
    """Return lines that compare each set's first evaluation with its last; none for a set with one evaluation."""
    lines = []
    for held_out in first_and_last(*columns(rows, evaluation=True), known=()):
        name, changes = held_out["set"], held_out["lines"]
        lines.append(f"held out{f' ({name})' if name else ''}, step {changes[0]['first']} -> {changes[0]['last']}:")
        width = max(len(line["metric"]) for line in changes)
        lines += [f"  {line['metric']:<{width}}  {line['before']:.3g} -> {line['after']:.3g}" for line in changes]
    return lines
