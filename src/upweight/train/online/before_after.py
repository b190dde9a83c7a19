"""What an online run has learned: held-out rewards before the first step against those after the last."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from upweight.log import logger
from upweight.runs.files import metrics_of
from upweight.runs.report.reading import columns
from upweight.runs.report.run import first_and_last


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
    lines = []
    for held_out in first_and_last(*columns(rows, evaluation=True), known=()):
        of, found = held_out["set"], held_out["lines"]
        lines.append(f"held out{f' ({of})' if of else ''}, step {found[0]['first']} -> {found[0]['last']}:")
        width = max(len(line["metric"]) for line in found)
        lines += [f"  {line['metric']:<{width}}  {line['before']:.3g} -> {line['after']:.3g}" for line in found]
    return lines
