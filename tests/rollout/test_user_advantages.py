"""Advantages of a user's function: what it sees, what it may return, and what is said of a wrong return."""

import math

import pytest
import torch

from upweight.errors import UserError
from upweight.methods import GRPO
from upweight.rollout.units import units_of_groups
from upweight.rollout.user_advantages import add_user_advantages
from upweight.types import Completion, Group


def made_groups():
    one = Group(0, {"prompt": "a", "answer": "x", "prompt_ids": [1]}, [1], [made([5, 6]), made([7])])
    two = Group(1, {"prompt": "b", "answer": "y", "prompt_ids": [2]}, [2], [made([5, 6, 7]), made([8], failure="lost")])
    one.rewards_SR, two.rewards_SR = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 1.0], [math.nan] * 2])
    one.extras = {"tags": ["p", "q"]}
    return [one, two]


def made(ids, **more):
    return Completion(ids, [0.0] * len(ids), [0] * len(ids), finished=len(ids) > 1, **more)


def advantages_of(function, *, groups=None, log_ratio_S=None, **settings):
    groups = made_groups() if groups is None else groups
    method = GRPO(advantage_estimator=function, **settings)
    add_user_advantages(method.advantage_function, groups, torch.tensor([0, 0, 1, 1]), method, log_ratio_S)
    return groups


def test_the_function_sees_every_completion():
    seen = {}

    def record(*, rewards, rewards_by_function, groups, lengths, finished, extras, columns, log_ratio, rewards_to_go,
               num_generations):  # fmt: skip
        seen.update(locals())
        return torch.zeros_like(rewards)

    method = GRPO(advantage_estimator=record)
    assert method.needs_kl_in_reward
    assert method.needs_reference
    advantages_of(record, reward_weights=[1, 10], log_ratio_S=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert seen["rewards"][:3].tolist() == [21.0, 10.0, 13.0]
    assert seen["rewards"].isnan().tolist() == [False, False, False, True]
    assert seen["rewards_by_function"].shape == (4, 2)
    assert seen["groups"].tolist() == [0, 0, 1, 1]
    assert seen["lengths"].tolist() == [2, 1, 3, 1]
    assert seen["finished"].tolist() == [True, False, True, False]
    assert seen["extras"] == {"tags": ["p", "q", None, None]}
    assert seen["columns"] == {"answer": ["x", "x", "y", "y"]}
    assert seen["log_ratio"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert seen["rewards_to_go"].shape == (4, 3)
    assert seen["num_generations"] == 8


def test_advantages_by_completion_leave_out_what_has_no_reward():
    groups = advantages_of(lambda rewards: rewards - 1)
    assert [group.advantage_S.tolist() for group in groups] == [[2.0, 0.0], [3.0, 0.0]]


@pytest.mark.parametrize("padded", [False, True])
def test_advantages_by_token_reach_the_samples(padded):
    rows = [[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [4.0, 5.0, 6.0], [math.nan, 9.0, 9.0]]
    lengths = [2, 1, 3, 1]
    result = torch.tensor(rows) if padded else [torch.tensor(row[:n]) for row, n in zip(rows, lengths, strict=True)]
    groups = advantages_of(lambda rewards: result)
    assert [group.advantage_S.tolist() for group in groups] == [[1.5, 3.0], [5.0, 0.0]]
    units = units_of_groups(groups, mask_truncated=False, sampler_logps=False)
    assert [unit.samples[0].token_advantages.tolist() for unit in units] == [[1, 2], [3], [4, 5, 6], [0]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(3), r"returned \[3\]; wanted one number for each of 4 completions"),
        (torch.zeros(4, 2, 2), r"returned \[4, 2, 2\]; wanted"),
        (torch.zeros(4, 2), "completion 2 has 3 tokens, and 2 advantages"),
        ([torch.zeros(2), torch.zeros(1), torch.zeros(4), torch.zeros(1)], "completion 2 has 3 tokens, and 4 adv"),
        (None, "returned a NoneType of other things; wanted"),
        ("abcd", "returned a str of other things; wanted"),
        (torch.tensor([0.0, math.nan, 0.0, 0.0]), "returned NaN or infinity for completions that have a reward"),
    ],
)
def test_a_wrong_return_is_said_in_words(result, message):
    def wrong(rewards):
        return result

    with pytest.raises(UserError, match=r"trl\.advantage_estimator: '.*wrong'") as error:
        advantages_of(wrong)
    assert error.match(message)
