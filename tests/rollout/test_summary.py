"""Rollouts in numbers."""

import math

import pytest
import torch

from upweight.methods import GRPO
from upweight.rollout.summary import has_signal, pass_rates, summary
from upweight.types import Completion, Group

NAN = float("nan")


def group(*rewards, lengths=None, finished=None):
    lengths = lengths or [3] * len(rewards)
    finished = finished or [True] * len(rewards)
    completions = [
        Completion([1] * length, [-0.5] * length, [0] * length, ended)
        for length, ended in zip(lengths, finished, strict=True)
    ]
    return Group(0, {}, [9], completions, torch.tensor(rewards))


def test_signal_is_any_reward_that_tells_completions_apart():
    assert has_signal(group([1.0, 0.0], [1.0, 2.0]))
    assert not has_signal(group([1.0, 2.0], [1.0, 2.0]))
    assert not has_signal(group([NAN, 2.0], [1.0, 2.0]))


def test_metrics_have_the_names_and_values_people_know():
    method = GRPO(**{"reward_weights": (1.0, 2.0)})
    groups = [group([1.0, 0.0], [0.0, NAN], lengths=[2, 6], finished=[True, False]), group([1.0, 1.0], [1.0, 1.0])]
    found = summary(groups, ["a", "b"], method)
    totals = torch.tensor([1.0, 0.0, 3.0, 3.0])
    assert found["reward"] == pytest.approx(1.75)
    assert found["reward_std"] == pytest.approx(float(totals.std()))
    assert (found["reward_min"], found["reward_max"]) == (0.0, 3.0)
    assert found["group_reward_std"] == pytest.approx((0.5**0.5 + 0) / 2)  # of groups (1, 0) and (3, 3)
    assert found["rewards/a/mean"] == pytest.approx(0.75)
    assert found["rewards/b/mean"] == pytest.approx(2 / 3)
    assert found["frac_reward_zero_std"] == 0.5
    assert found["completions/mean_length"] == 3.5
    assert found["completions/max_length"] == 6
    assert found["completions/max_terminated_length"] == 3
    assert found["completions/clipped_ratio"] == 0.25
    assert found["sampling/entropy"] == pytest.approx(0.5)


def test_completions_that_are_their_end_alone_are_empty():
    one = group([0.0], [0.0], [0.0], [0.0], lengths=[1, 0, 1, 2], finished=[True, True, False, True])
    assert summary([one], ["a"], GRPO())["completions/empty_share"] == 0.5


def test_what_has_no_value_is_left_out():
    found = summary([group([NAN, NAN])], ["a", "b"], GRPO())
    assert not any(math.isnan(value) for value in found.values())
    assert not {"reward", "reward_min", "reward_max"} & set(found)
    found = summary([group([NAN], [-2.0], [NAN])], ["a"], GRPO())
    assert (found["reward_min"], found["reward_max"]) == (-2.0, -2.0)


def test_a_prompt_passes_when_one_of_its_completions_earns_something():
    groups = [group([0.0], [1.0]), group([0.0], [0.0]), group([NAN], [0.5])]
    found = pass_rates(groups, ["right"])
    assert found == {"rewards/right/pass@1": pytest.approx(0.5), "rewards/right/pass@2": pytest.approx(2 / 3)}


def test_episodes_in_numbers():
    played = group([1.0], [0.0], [NAN], finished=[True, False, False])
    played.completions[2] = Completion([], [], [], False, failure="broken")
    known = {"turns": 2, "tool_calls": 3, "tool_failures": 1, "seconds": 0.5, "splits": 1, "rewards": {}}
    played.extras["episode"] = [known, known | {"turns": 4, "tool_calls": 0, "tool_failures": 0}, known | {"turns": 0}]
    found = summary([played], ["a"], GRPO())
    assert found["environment/turns_mean"] == 2
    assert found["environment/turns_max"] == 4
    assert found["environment/masked"] == 1
    assert found["environment/truncated"] == 1
    assert found["environment/seconds"] == 1.5
    assert found["tools/call_frequency"] == 2
    assert found["tools/failure_frequency"] == pytest.approx(1 / 3)
    assert found["completions/clipped_ratio"] == 0.5
    assert found["completions/min_length"] == 3
    assert not any(name.startswith(("environment/", "tools/")) for name in summary([group([1.0])], ["a"], GRPO()))
