"""What a key adds between the steps of a run: its declaration, and a callback that does what it says.

Methods of a callback are named as the events of `transformers.TrainerCallback` and take the same arguments. The events
follow what is recorded; `metrics(state, logs)` comes before it, and returns metrics that a log gets besides.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upweight.errors import UserError
from upweight.log import logger
from upweight.settings import PositiveInt, Section, UserPath, setting

if TYPE_CHECKING:
    from torch.profiler import profile


class CallbackSection(Section):
    """Limits, profiles and checkpoints between steps, and callbacks of yours."""

    callbacks: list[UserPath | dict[str, dict[str, Any]]] = setting(
        "callbacks",
        [],
        "Your subclasses of transformers.TrainerCallback: `mine.Name`, or `mine.Name: {option: value}`.",
    )
    save_first_step: bool = setting("save_first_step", False, "Also save after step 1, to test that saving works.")
    loss_limit: float | None = setting("loss_watchdog_threshold", None, "Stop if the loss stays above this.", gt=0)
    loss_limit_patience: PositiveInt = setting(
        "loss_watchdog_patience", 3, "Consecutive logs above `loss_watchdog_threshold` after which the run stops."
    )
    profiler_steps: PositiveInt | None = setting("profiler_steps", None, "Number of steps to profile.")
    profiler_start: int = setting("profiler_steps_start", 0, "Step at which the profile begins.", ge=0)


def callbacks_of(section: CallbackSection, folder: Path) -> Iterator[Any]:
    """Yield the callbacks of the keys that are set, for a run into `folder`."""
    if section.save_first_step:
        yield SaveFirstStep()
    if section.loss_limit is not None:
        yield LossLimit(section.loss_limit, section.loss_limit_patience, folder)
    if section.profiler_steps is not None:
        yield Profiler(folder, section.profiler_steps, section.profiler_start)


class SaveFirstStep:
    """Saves a checkpoint after the first step, to test early that saving works."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or state.global_step == 1


class LossLimit:
    """Stops the run when the logged loss stays above a limit."""

    def __init__(self, limit: float, patience: int, folder: Path) -> None:
        self.limit, self.patience, self.folder, self.above = limit, patience, folder, 0
        self.was_below = False

    def metrics(self, state: Any, logs: Mapping[str, float]) -> dict[str, float]:
        if "loss" not in logs:
            return {}
        self.above = self.above + 1 if logs["loss"] > self.limit else 0
        self.was_below = self.was_below or self.above == 0
        return {"loss_watchdog/logs_above": self.above}

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.above >= self.patience:
            now = f"in {self.above} logs in a row, now {kwargs['logs']['loss']:.4g}"
            step = f"stopped at step {state.global_step}"
            problem = f"{step}: the loss was above loss_watchdog_threshold ({self.limit:g}) {now}"
            began_above = "It was above it from the first log on: raise the threshold."
            remedy = "Lower 'learning_rate' or raise the threshold." if self.was_below else began_above
            raise UserError(f"{problem}. {self._what_is_left()} {remedy}")

    def _what_is_left(self) -> str:
        """Return a sentence about what the run leaves: its model is saved at the end only."""
        there = [path for path in self.folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
        newest = max(there, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)
        if newest is None:
            return "No model was saved, and there is no checkpoint."
        return f"No model was saved; the last checkpoint is {newest}."


class Profiler:
    """Records the steps from `start` on, counted from 0, into `profile.json`, which trace viewers read."""

    def __init__(self, folder: Path, steps: int, start: int) -> None:
        self.file, self.steps, self.start = folder / "profile.json", steps, start
        self._recording: profile | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._recording is None and state.global_step == self.start:
            import torch  # `validate` reads this file too, and needs no torch
            from torch.profiler import ProfilerActivity, profile

            device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._recording = profile(activities=[ProfilerActivity.CPU, *device])
            self._recording.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.start + self.steps:
            self.on_train_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording.export_chrome_trace(str(self.file))
            self._recording, self.start = None, -1
            logger.info("profile: %s", self.file)
