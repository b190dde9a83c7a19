"""The frozen Config: one section for each part of the program, and the training method."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from upweight.callbacks import CallbackSection
from upweight.config.sections.data import DataSection
from upweight.config.sections.environment import EnvironmentSection
from upweight.config.sections.model import AdapterSection, ModelSection, TeacherSection
from upweight.config.sections.rollout import GymSection, RolloutSection, VllmSection
from upweight.config.sections.run import RunSection, TrackingSection
from upweight.config.sections.training import OptimSection, ShardingSection
from upweight.errors import UserError
from upweight.methods import METHODS
from upweight.methods.base import Method
from upweight.settings import Key, Section, UserPath, keys_of, setting

NOT_BY_RL = {"sft": "SFT (no `rl`)", "orm": "reward_model: true", "prm": "process_reward_model: true"}
if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(name for name in METHODS if name not in NOT_BY_RL)]


class ChoiceSection(Section):
    """The choice of the training method."""

    rl: MethodName | UserPath | None = setting(
        "rl", None, "Training method, or the path of a class of yours. When left out: supervised fine-tuning."
    )
    reward_model: bool = setting("reward_model", False, "Train an outcome reward model.")
    process_reward_model: bool = setting("process_reward_model", False, "Train a process reward model.")
    stages: list[dict[str, Any]] = setting(
        "stages",
        [],
        "Several trainings, each starting from the result of the one before: a `name` and keys that differ.",
    )
    plugins: list[str] = setting("plugins", [], "Axolotl plugins; accepted if Upweight has the feature built in.")


@dataclass(frozen=True)
class Config:
    """A checked config; each package reads the section that belongs to it."""

    choice: ChoiceSection
    model: ModelSection
    adapter: AdapterSection
    teacher: TeacherSection
    data: DataSection
    optim: OptimSection
    sharding: ShardingSection
    run: RunSection
    callbacks: CallbackSection
    tracking: TrackingSection
    rollout: RolloutSection
    environment: EnvironmentSection
    vllm: VllmSection
    gym: GymSection
    method: Method
    set_keys: Mapping[str, Any]  # YAML path -> value, for every key that was set
    folder: Path  # of the YAML file; relative paths are also looked up from here
    notices: tuple[str, ...] = ()
    stages: tuple["Config", ...] = ()  # one config per stage; this config is then that of the last stage

    @property
    def order_seed(self) -> int:
        """The seed of the order in which rows are trained on; `optim.seed` chooses which rows those are."""
        return self.optim.seed if self.data.order_seed is None else self.data.order_seed


class ConfigError(UserError):
    """The errors of a config, with the notices about the rest of it."""

    def __init__(self, errors: Iterable[str], notices: Iterable[str] = (), drafts: Iterable[Config] = ()) -> None:
        super().__init__("\n".join(dict.fromkeys(errors)))
        self.notices = tuple(dict.fromkeys(notices))
        self.drafts = tuple(drafts)  # what the other keys describe, by stage; none where the method is in doubt


SECTIONS: dict[str, type[Section]] = {
    field.name: field.type
    for field in fields(Config)
    if isinstance(field.type, type) and issubclass(field.type, Section) and field.name != "method"
}


@cache
def general_keys() -> dict[str, tuple[str, Key]]:
    """Return every YAML path that does not depend on the method, with the section that reads it."""
    return {key.path: (name, key) for name, section in SECTIONS.items() for key in keys_of(section)}


@cache
def method_keys() -> dict[str, dict[str, Key]]:
    """Return every YAML path that belongs to methods, with the methods that read it."""
    table: dict[str, dict[str, Key]] = {}
    for name, method in METHODS.items():
        for key in keys_of(method):
            table.setdefault(key.path, {})[name] = key
    return table


@cache
def blocks() -> frozenset[str]:
    """Return the top-level keys that contain further keys: `trl`, `vllm`, ..."""
    return frozenset(path.split(".")[0] for path in (*general_keys(), *method_keys()) if "." in path)


def nested(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return values by their YAML path as a config has them: that of `trl.beta` in the block `trl`."""
    content: dict[str, Any] = {}
    for path, value in values:
        block, _, name = path.rpartition(".")
        (content.setdefault(block, {}) if block else content)[name] = value
    return content


def how_to_choose(method: str) -> str:
    """Return the YAML line that chooses a method."""
    return NOT_BY_RL.get(method, f"rl: {method}")
