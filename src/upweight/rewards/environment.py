"""Rewards that an environment returns for an episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.config.sections.environment import ENVIRONMENT_REWARDS
from upweight.rewards.call import RewardParameters
from upweight.rewards.reward import Reward

COLUMN = "episode"  # column of a call with the episode of each completion


@dataclass(frozen=True)
class EpisodeReward:
    """Reads one named reward of each episode; None if the episode has none."""

    component: str

    def __call__(self, completions: Sequence[Any], episode: Sequence[Mapping[str, Any] | None] = ()) -> list[Any]:
        episodes = [info or {} for info in episode] or [{}] * len(completions)
        return [info.get("rewards", {}).get(self.component) for info in episodes]


def environment_rewards(names: Sequence[str]) -> list[Reward]:
    """Return one reward for each component name; a single one gets the name that configs use."""
    parameters = RewardParameters(("completions", COLUMN), (), everything=False)
    shown = names if len(names) > 1 else [ENVIRONMENT_REWARDS[0]] * len(names)
    return [
        Reward(name, EpisodeReward(component), parameters, has_timeout=False)
        for name, component in zip(shown, names, strict=True)
    ]
