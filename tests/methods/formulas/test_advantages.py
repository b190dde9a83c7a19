from math import nan, sqrt

import pytest
import torch

from upweight.errors import UserError
from upweight.methods import EBFT, GDPO, GRPO

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
ONE = torch.tensor([[0.0], [1.0], [2.0], [5.0], [5.0], [5.0]])
ALIGNED = torch.cat([ONE, torch.zeros_like(ONE)], 1)  # EBFT: alignment, and no crowding
STD_ALL = sqrt(sum((x - 3) ** 2 for x in (0, 1, 2, 5, 5, 5)) / 5)


def advantages(rewards, groups=GROUPS, **settings):
    return GRPO(**settings).advantages(rewards, groups).tolist()


@pytest.mark.parametrize(
    ("scale", "divisor"),
    [("group", 1.0 + 1e-4), (True, 1.0 + 1e-4), ("batch", STD_ALL + 1e-4), ("none", 1.0), (False, 1.0)],
)
def test_rewards_are_centred_on_their_group_and_scaled(scale, divisor):
    expected = [-1 / divisor, 0.0, 1 / divisor, 0.0, 0.0, 0.0]
    assert advantages(ONE, scale_rewards=scale) == pytest.approx(expected)


def test_groups_may_be_interleaved():
    shuffled = torch.tensor([3, 0, 4, 1, 5, 2])
    expected = torch.tensor(advantages(ONE))[shuffled].tolist()
    assert advantages(ONE[shuffled], GROUPS[shuffled]) == pytest.approx(expected)


def test_a_group_of_equal_rewards_gets_exactly_zero():
    rewards = torch.full((7, 2), 0.1)
    for settings in ({}, {"advantage_estimator": "rloo"}, {"reward_weights": [0.7, 0.3]}):
        assert advantages(rewards, torch.zeros(7, dtype=torch.int64), **settings) == [0.0] * 7


def test_weights_and_rewards_that_do_not_apply():
    rewards = torch.tensor([[1.0, nan], [0.0, 2.0], [nan, nan], [nan, 1.0]])
    # Weighted sums 2, 1, nothing, 0.5; the third row is left out of mean and deviation.
    mean, std = 3.5 / 3, sqrt(((2 - 3.5 / 3) ** 2 + (1 - 3.5 / 3) ** 2 + (0.5 - 3.5 / 3) ** 2) / 2)
    expected = [(2 - mean) / (std + 1e-4), (1 - mean) / (std + 1e-4), 0.0, (0.5 - mean) / (std + 1e-4)]
    got = advantages(rewards, torch.zeros(4, dtype=torch.int64), reward_weights=[2.0, 0.5])
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_batch_where_nothing_applies_gets_zero():
    assert advantages(torch.full((6, 2), nan)) == [0.0] * 6


def test_rloo_takes_the_mean_of_the_others():
    rewards = torch.tensor([[0.0], [1.0], [5.0], [3.0], [nan], [1.0]])
    assert advantages(rewards, advantage_estimator="rloo") == pytest.approx([-3.0, -1.5, 4.5, 2.0, 0.0, -2.0])


def test_gdpo_normalises_each_reward_before_it_sums():
    rewards = torch.tensor([[0.0, 10.0], [1.0, 10.0], [2.0, 40.0], [1.0, nan], [1.0, 7.0], [4.0, 9.0]])

    def z(values, valid=None):
        kept = [v for v, k in zip(values, valid or [True] * len(values), strict=True) if k]
        mean = sum(kept) / len(kept)
        std = sqrt(sum((v - mean) ** 2 for v in kept) / (len(kept) - 1))
        return [(v - mean) / (std + 1e-4) if k else 0.0 for v, k in zip(values, valid or [True] * 6, strict=False)]

    first, second = z([0, 1, 2]) + z([1, 1, 4]), z([10, 10, 40]) + z([0, 7, 9], [False, True, True])
    expected = z([1.0 * a + 0.5 * b for a, b in zip(first, second, strict=True)])
    policy = {"reward_weights": [1.0, 0.5]}
    assert GDPO(**policy).advantages(rewards, GROUPS).tolist() == pytest.approx(expected, abs=1e-5)
    by_key = GRPO(**policy, aggregation="normalize_then_sum")
    assert by_key.advantages(rewards, GROUPS).tolist() == pytest.approx(expected, abs=1e-5)


def test_gdpo_leaves_out_rows_without_any_reward():
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.5], [nan, nan]])
    groups = torch.zeros(3, dtype=torch.int64)
    got = GDPO().advantages(rewards, groups)
    assert got[2] == 0
    torch.testing.assert_close(got[:2], GDPO().advantages(rewards[:2], groups[:2]))


def test_one_weight_for_each_reward_is_asked_for():
    with pytest.raises(UserError, match="2 entries for 1 reward functions"):
        advantages(ONE, reward_weights=[1.0, 2.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", [-1.5, 0.0, 1.5]),
        ("group_norm", [-1 / 1.0001, 0.0, 1 / 1.0001]),
        ("grpo", [-1 / 1.0001, 0.0, 1 / 1.0001]),
        ("reinforce", [0.0, 1.0, 2.0]),
    ],
)
def test_ebft_estimators_of_strided_mode(estimator, expected):
    method = EBFT(mode="strided", baseline=estimator)
    assert method.advantages(ALIGNED[:3], GROUPS[:3]).tolist() == pytest.approx(expected)


def test_a_lone_strided_sample_keeps_its_reward():
    assert EBFT(mode="strided").advantages(ALIGNED[3:4], torch.tensor([0])).tolist() == [5.0]


def test_ebft_structured_follows_the_settings_of_the_policy_gradient():
    policy = {"scale_rewards": "none"}
    method = EBFT(**policy, baseline="group_norm")
    assert method.advantages(ALIGNED, GROUPS).tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
