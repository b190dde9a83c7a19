"""What watches a run: signals that end it well, losses that are no numbers, the line on the terminal."""

import math
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from upweight.errors import UserError
from upweight.log import logger

SHOWN = ("loss", "rewards/accuracies", "rewards/margins", "accuracy", "mean_token_accuracy", "kl", "grad_norm")


class StopOnSignal(TrainerCallback):
    """SIGTERM and Ctrl-C end the run after the current step, with a checkpoint; a second one ends it at once."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._catch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.caught is not None:
            control.should_save = control.should_log = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.caught = number
        logger.warning("%s: saving after this step, then stopping", signal.Signals(number).name)


class StopOnNan(TrainerCallback):
    """Ends the run when the loss or the gradient stops being a number, before such weights are saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = control.should_log or control.should_save

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, float] = kwargs["logs"]
        bad = [name for name in ("loss", "grad_norm") if name in logs and not math.isfinite(logs[name])]
        if bad:
            raise UserError(
                f"step {state.global_step}: {bad[0]} is {logs[bad[0]]}. The last checkpoint in "
                f"{Path(args.output_dir)} is from before. Lower 'learning_rate', set 'max_grad_norm', or look at "
                "the rows of this step."
            )


class Progress(TrainerCallback):
    """One line for each log: what matters, tokens per second, time left."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first_step = time.perf_counter(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, float] = kwargs["logs"]
        if not state.is_world_process_zero:
            return
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        shown = [f"{name.split('/')[-1]} {logs[prefix + name]:.4g}" for name in SHOWN if prefix + name in logs]
        if not shown:
            return
        done = state.global_step - self.first_step
        left = (time.perf_counter() - self.started) / max(done, 1) * (state.max_steps - state.global_step)
        if "tokens_per_second" in logs:
            shown += [f"{logs['tokens_per_second']:.0f} tokens/s", f"{_duration(left)} left"]
        label = "evaluation" if prefix else "step"
        logger.info("%s %d/%d  %s", label, state.global_step, state.max_steps, "  ".join(shown))


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"
