"""A profile of a few steps, in the format that trace viewers read."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from upweight.log import logger


class Profiler(TrainerCallback):
    """Records the steps from `start` on, counted from 0, into `profile.json` in the run folder."""

    def __init__(self, folder: Path, steps: int, start: int) -> None:
        self.file, self.steps, self.start = folder / "profile.json", steps, start
        self._recording: profile | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._recording is None and state.global_step == self.start:
            device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._recording = profile(activities=[ProfilerActivity.CPU, *device])
            self._recording.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recording is not None and state.global_step >= self.start + self.steps:
            self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._recording is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._recording is not None
        self._recording.stop()
        self._recording.export_chrome_trace(str(self.file))
        self._recording, self.start = None, -1
        logger.info("profile: %s", self.file)
