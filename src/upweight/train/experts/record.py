"""Writes how often the experts of each layer were chosen to the run folder."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from upweight.files import write_text
from upweight.runs.files import EXPERT_LOAD, JsonLines
from upweight.train.experts.balance import RouterBalance


class ExpertLoads(TrainerCallback):
    """Appends one JSON object for each log: the step, and by layer the share of choices that each expert had."""

    def __init__(self, folder: Path, balance: RouterBalance) -> None:
        self.path, self.balance = folder / EXPERT_LOAD, balance

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.path.exists():  # a resumed run goes on from its checkpoint
            kept = [row for row in JsonLines(self.path).read() if row.get("step", 0) <= (state.global_step or -1)]
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        load = self.balance.take_load() if "loss" in kwargs["logs"] else None
        if load is not None and state.is_world_process_zero:
            rounded = [[round(share, 6) for share in layer] for layer in load]
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "load": rounded}) + "\n")
