"""The progress bar and table of a notebook, with the metrics that say how a run goes beside its loss."""

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from html import escape
from typing import Any

from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import IntervalStrategy

SHOWN = (
    "reward", "rewards/*/mean", "group_reward_std", "completions/mean_length", "rewards/accuracies", "rewards/margins",
    "accuracy", "margin", "kl", "entropy", "mean_token_accuracy", "grad_norm",
)  # fmt: skip


def columns(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a log that the table shows, in its order; a reward may be named `<lambda>`."""
    return {escape(name): logs[name] for pattern in SHOWN for name in logs if fnmatchcase(name, pattern)}


def evaluated_columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss and the shown metrics of an evaluation, under their names with its prefix."""
    prefix = next((name.removesuffix("loss") for name in metrics if name.endswith("_loss")), "eval_")
    shown = columns({name.removeprefix(prefix): value for name, value in metrics.items()})
    losses = {name: value for name, value in metrics.items() if name == f"{prefix}loss"}
    return losses | {f"{prefix}{name}": value for name, value in shown.items()}


def close_bars(callbacks: Iterable[Any]) -> None:
    """End the bars of the Trainer's progress, which stays open where a training fails and is drawn again later."""
    for callback in callbacks:
        if isinstance(callback, ProgressCallback):
            for name in ("training_bar", "prediction_bar"):
                if (bar := getattr(callback, name)) is not None:
                    bar.close()
                    setattr(callback, name, None)


def show_metrics_in_notebook(trainer: Any) -> None:
    """Put our table in the place of the Trainer's, where it has one: in a notebook."""
    if "transformers.utils.notebook" not in sys.modules:  # the Trainer imports it where there is a notebook
        return
    from transformers.utils.notebook import NotebookProgressCallback

    class NotebookTable(NotebookProgressCallback):
        """The Trainer's table, with a column for each shown metric."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            # With evaluations a row is what one of them measured.
            if args.eval_strategy == IntervalStrategy.NO and "loss" in logs and self.training_tracker is not None:
                row = {"Step": state.global_step, "Training Loss": logs["loss"], **columns(logs)}
                self.training_tracker.write_line(row)
                if self.training_tracker.wait_for == 1:  # steps are slow, and the next one would show it
                    self.training_tracker.display()

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            super().on_evaluate(args, state, control, metrics=evaluated_columns(metrics or {}), **kwargs)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.training_tracker is not None:
                # The bar counts one step ahead, so it has no speed if a run ends early at its second step; it would
                # divide by it where it still has an estimate.
                self.training_tracker.predicted_remaining = None
            super().on_train_end(args, state, control, **kwargs)

    callbacks = trainer.callback_handler.callbacks
    for place, callback in enumerate(callbacks):
        if type(callback) is NotebookProgressCallback:
            callbacks[place] = NotebookTable()
