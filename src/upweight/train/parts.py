"""The parts that `assemble` builds and `MethodTrainer` takes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from upweight.train.lr_groups import LrRule
from upweight.train.online.feed import RolloutFeed
from upweight.train.policy import Policy


@dataclass
class TrainerParts:
    """Everything that `MethodTrainer` is built from."""

    policy: Policy
    arguments: TrainingArguments
    train_dataset: Any = None
    eval_dataset: Any = None
    encode: Callable[..., Any] | None = None  # prepares rows that a script passes to `evaluate`
    rollouts: RolloutFeed | None = None  # yields the steps of an online method
    shuffle: bool = True
    allow_changed_data: bool = False  # on a resume
    lr_rule: LrRule | None = None
    callbacks: Sequence[TrainerCallback] = ()
    optimizers: tuple[Any, Any] = (None, None)
    optimizer_class: tuple[type, dict[str, Any]] | None = None
    recording: Callable[[Any], AbstractContextManager[Any]] | None = None  # context manager around a script's training
