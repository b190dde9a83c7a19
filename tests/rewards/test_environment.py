"""What an environment says, as rewards."""

import math

import pytest

from made_rewards import reward_call
from upweight.errors import UserError
from upweight.rewards.load import as_rewards, load_rewards
from upweight.rewards.scorer import Scorer

EPISODES = [{"rewards": {"right": 1.0, "short": 0.5}}, {"rewards": {"right": 0.0}}, None]


@pytest.mark.parametrize(
    ("named", "given", "columns"),
    [
        ([], ["only"], ["reward_env"]),
        ([], ["right", "short"], ["right", "short"]),
        (["reward_env", "reward_nemo_gym_verify"], ["right", "short"], ["right", "short"]),
        (["axolotl.integrations.nemo_gym.rewards.reward_env", "repetition"], ["only"], ["reward_env", "repetition"]),
        (["repetition"], ["only"], ["repetition"]),
    ],
)
def test_environment_rewards_come_once_and_where_they_are_named(named, given, columns, tmp_path):
    assert [reward.name for reward in load_rewards(named, tmp_path, environment=given)] == columns


def test_scripts_get_them_beside_their_own():
    assert [reward.name for reward in as_rewards(["repetition"], environment=["only"])] == ["repetition", "reward_env"]
    assert [reward.name for reward in as_rewards(["reward_env", "repetition"], environment=["only"])] == [
        "reward_env",
        "repetition",
    ]


def test_without_an_environment_there_is_no_such_reward(tmp_path):
    with pytest.raises(UserError, match="'reward_env' needs an environment"):
        load_rewards(["reward_env"], tmp_path)


def test_a_component_that_an_episode_does_not_give_does_not_apply(tmp_path):
    with Scorer(load_rewards([], tmp_path, environment=["right", "short"])) as scorer:
        found = scorer.score(reward_call(["a", "b", "c"], episode=EPISODES)).rewards_SR.tolist()
    assert found[0] == [1.0, 0.5]
    assert found[1][0] == 0.0
    assert all(map(math.isnan, [found[1][1], *found[2]]))
