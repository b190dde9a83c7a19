"""What an environment itself says of an episode, as rewards beside any others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.config.sections.environment import ENVIRONMENT_REWARDS
from upweight.rewards.call import Takes
from upweight.rewards.reward import Reward

COLUMN = "episode"  # of a call: what is known about each completion's episode


@dataclass(frozen=True)
class EpisodeReward:
    """Reads one named reward of each episode; None where it gave none."""

    component: str

    def __call__(self, completions: Sequence[Any], episode: Sequence[Mapping[str, Any] | None] = ()) -> list[Any]:
        known = [one or {} for one in episode] or [{}] * len(completions)
        return [one.get("rewards", {}).get(self.component) for one in known]


def environment_rewards(names: Sequence[str]) -> list[Reward]:
    """A reward for each name that outcomes may carry; a single one is named as people ask for it."""
    takes = Takes(("completions", COLUMN), (), everything=False)
    shown = names if len(names) > 1 else [ENVIRONMENT_REWARDS[0]] * len(names)
    return [
        Reward(own, EpisodeReward(component), takes, is_limited=False)
        for own, component in zip(shown, names, strict=True)
    ]
