"""Rollouts as plain values."""

import json
from dataclasses import replace

import numpy as np
import torch

from upweight.rollout.rollout import Rollout, from_plain, readable, to_plain
from upweight.types import Completion, Group

ROWS = [{"prompt_ids": [1], "prompt": "a"}, {"prompt_ids": [2, 3], "prompt": "b", "answer": "c"}]


def rollout():
    completions = [
        Completion([4, 5], [-0.123456789, -2.0], [3, 3], True),
        Completion([6], [], [], False, sampled=[True], text="six"),
    ]
    rewards = torch.tensor([[0.1, float("nan")], [0.3, 1.0]])
    group = Group(1, ROWS[1], [2, 3], completions, rewards, torch.tensor([0.7, -0.7]), {"seen": ["x", "y"]})
    return Rollout(2, 9, [group])


def test_the_experts_of_a_completion_survive_json():
    before = rollout()
    routes = np.arange(24, dtype=np.int16).reshape(4, 3, 2) - 1
    before.groups[0].completions[0] = replace(before.groups[0].completions[0], routes=routes)
    after = from_plain(json.loads(json.dumps(to_plain(before))), ROWS)
    one, other = after.groups[0].completions
    assert np.array_equal(one.routes, routes)
    assert other.routes is None


def test_a_rollout_survives_json_bit_by_bit():
    before = rollout()
    after = from_plain(json.loads(json.dumps(to_plain(before))), ROWS)
    assert (after.number, after.version) == (2, 9)
    (group,) = after.groups
    assert group.completions == before.groups[0].completions
    assert group.prompt_ids == [2, 3]
    assert group.row is ROWS[1]
    assert torch.equal(group.advantage_S, before.groups[0].advantage_S)
    assert torch.equal(group.rewards_SR.nan_to_num(5), before.groups[0].rewards_SR.nan_to_num(5))


def test_people_read_one_object_for_each_completion():
    first, second = readable(rollout(), ["a", "b"], lambda ids: " ".join(map(str, ids)))
    assert first["completion"] == "4 5"
    assert first["rewards"]["b"] is None
    assert second["completion"] == "six"
    assert (second["seen"], second["prompt"], second["tokens"]) == ("y", "b", 1)
    assert second["answer"] == "c"  # what rewards read, so that they can be tried on the file
    assert "prompt_ids" not in second


def test_conversations_in_stretches_survive_a_checkpoint():
    early = Completion([4], [-0.4], [1], finished=True, sampled=[True])
    said = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    late = Completion([6], [-0.1], [2], finished=True, sampled=[True], earlier=[early], messages=said)
    failed = Completion([], [], [], finished=False, failure="broken", messages=[])
    group = Group(0, {"prompt": "p"}, [7], [late, failed], torch.tensor([[1.0], [torch.nan]]), torch.zeros(2))
    rollout = Rollout(0, 2, [group])
    again = from_plain(json.loads(json.dumps(to_plain(rollout))), [{"prompt": "p"}])
    assert again.groups[0].completions == [late, failed]
    shown = list(readable(rollout, ["r"], str))
    assert shown[0]["completion"] == said
    assert (shown[1]["failure"], shown[1]["rewards"]) == ("broken", {"r": None})
