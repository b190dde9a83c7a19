"""Callbacks that complete a checkpoint once the Trainer has written it, and delete the oldest."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import warn_once
from upweight.runs.checkpoints import DATA, WHOLE, checkpoints_of, data_digest_of, mark_whole
from upweight.train.distributed.ranks import broadcast_from_rank0


def require_same_data(checkpoint: Path, data_digest: Callable[[], str], *, allowed: bool) -> None:
    """Raise on all ranks where the training rows are not those of the checkpoint, unless that is allowed."""
    before = data_digest_of(checkpoint)
    if before is None:
        warn_once(f"{checkpoint} holds no hash of its data; whether the data changed is not checked")
    elif not allowed and not broadcast_from_rank0(PartialState().is_main_process and before == data_digest()):
        raise UserError(
            f"resume: the training data is not what {checkpoint} was trained on. Restore the data and the keys that "
            "shape it, or go on with the other data by --allow-changed-data (allow_changed_data: true)."
        )


class KeepCheckpoints(TrainerCallback):
    """Marks each checkpoint once all ranks have written it, then deletes the oldest beyond `limit`."""

    def __init__(self, limit: int | None, data_digest: Callable[[], str]) -> None:
        self.limit, self.data_digest = limit, data_digest

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ranks = PartialState()
        ranks.wait_for_everyone()
        run_folder = Path(args.output_dir)
        folder = run_folder / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            write_text(folder / DATA, json.dumps({"train": self.data_digest()}))
            mark_whole(folder)
            best = state.best_model_checkpoint and Path(state.best_model_checkpoint).resolve()
            beyond = [] if self.limit is None else checkpoints_of(run_folder)[self.limit :]
            for old in (path for _, path in beyond if path.resolve() != best):
                (old / WHOLE).unlink(missing_ok=True)  # a half-deleted folder must not count as complete
                shutil.rmtree(old)
        ranks.wait_for_everyone()


class SaveFirstStep(TrainerCallback):
    """Saves a checkpoint after the first step, to test early that saving works."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or state.global_step == 1
