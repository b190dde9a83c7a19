"""Groups that are trained on again."""

import json

import torch

from light_rewards import one_prompt_only
from made_rollouts import online_trainer
from upweight.rollout.replay import ReplayBuffer, worth
from upweight.types import Completion, Group

ROWS = [{"prompt_ids": [number]} for number in range(20)]


def group(number, rewards, version=0):
    rewards_SR = torch.tensor(rewards)[:, None]
    advantage_S = rewards_SR[:, 0] - rewards_SR.mean()
    completions = [Completion([1], [-1.0], [version], True) for _ in rewards]
    return Group(number, ROWS[number], [number], completions, rewards_SR, advantage_S, version=version)


def test_groups_without_signal_are_replaced_by_kept_ones():
    buffer = ReplayBuffer(4, max_age=100)
    filled, metrics = buffer.fill([group(0, [0.0, 1.0]), group(1, [1.0, 1.0])], 0, (1, 0))
    assert [one.number for one in filled] == [0, 1]  # what is new does not take its neighbour's place
    assert metrics == {"replay/kept": 1.0, "replay/replaced": 0.0}
    filled, metrics = buffer.fill([group(2, [1.0, 1.0]), group(3, [0.0, 2.0], version=5)], 5, (1, 1))
    assert [(one.number, one.replayed) for one in filled] == [(0, True), (3, False)]
    assert metrics == {"replay/kept": 2.0, "replay/replaced": 1.0, "replay/age": 5.0}
    assert torch.equal(filled[0].advantage_S, torch.tensor([-0.5, 0.5]))


def test_the_best_are_kept_and_the_old_are_dropped():
    buffer = ReplayBuffer(2, max_age=3)
    buffer.fill([group(n, [0.0, float(n)], version=n) for n in range(1, 5)], 4, (1, 0))
    assert sorted(one.number for one in buffer.kept) == [3, 4]
    assert worth(group(1, [0.0, 2.0])) > worth(group(1, [0.0, 1.0]))
    buffer.fill([], 7, (1, 1))
    assert [one.number for one in buffer.kept] == [4]


def test_no_group_is_drawn_twice_and_draws_follow_worth():
    buffer = ReplayBuffer(3, max_age=100)
    buffer.fill([group(1, [0.0, 0.1]), group(2, [0.0, 5.0])], 0, (1, 0))
    drawn = []
    for seed in range(30):
        filled, _ = buffer.fill([group(9, [1.0, 1.0])], 1, (1, seed))
        drawn.append(filled[0].number)
    assert drawn.count(2) > 25
    filled, _ = buffer.fill([group(9, [1.0, 1.0])] * 5, 1, (1, 99))
    assert sorted(one.number for one in filled) == [1, 2, 9, 9, 9]


def test_a_buffer_survives_json():
    buffer, later = ReplayBuffer(3, 100), ReplayBuffer(3, 100)
    buffer.fill([group(1, [0.0, 0.1]), group(2, [0.0, 5.0], version=3)], 3, (1, 0))
    later.restore(json.loads(json.dumps(buffer.state())), ROWS)
    again = [one.fill([group(9, [1.0, 1.0])], 4, (1, 7))[0][0] for one in (buffer, later)]
    assert again[0].number == again[1].number
    assert again[0].completions == again[1].completions


def test_replay_feeds_a_run_whose_prompts_mostly_teach_nothing(tmp_path):
    for recompute in (True, False):
        section = {"replay_size": 4, "replay_recompute": recompute}
        trainer = online_trainer(tmp_path / str(recompute), rewards=[one_prompt_only], section=section, max_steps=8)
        trainer.train()
        replaced = [row["replay/replaced"] for row in trainer.state.log_history if "replay/replaced" in row]
        assert sum(replaced) > 0
        replayed = [g for g in trainer.rollouts.current.groups if g.replayed]
        assert all("cat" in one.row["prompt"] for one in replayed)
