"""Failed prompts that are tried again."""

import json

import torch

from light_rewards import never_dogs
from made_rollouts import online_trainer
from upweight.rollout.replay import Reroll, failed
from upweight.types import Group

NAN = float("nan")


def group(number, *rewards):
    return Group(number, {}, [1], rewards_SR=torch.tensor(rewards))


def test_a_group_fails_when_nothing_earned_anything():
    assert failed(group(0, [0.0, 0.0], [0.0, NAN]))
    assert not failed(group(0, [0.0, 0.0], [0.0, 0.1]))
    assert not failed(group(0, [NAN], [NAN]))
    assert not failed(group(0, [1.0], [1.0]))  # solved by all: no signal, but nothing to try again


def test_failed_prompts_come_up_again_after_the_start_and_within_bounds():
    reroll = Reroll(start=0.5, most=2, capacity=3)
    reroll.note([group(n, [0.0], [0.0]) for n in (1, 2, 2, 3, 4)])
    assert list(reroll.waiting) == [2, 3, 4]
    assert reroll.take(0.4, limit=9) == []
    assert reroll.take(0.5, limit=9) == [2, 3]
    assert reroll.take(0.9, limit=9) == [4]
    assert reroll.take(1.0, limit=9) == []


def test_prompts_that_a_rollout_has_no_room_for_go_on_waiting():
    reroll = Reroll(start=0.0, most=3, capacity=9)
    reroll.note([group(n, [0.0], [0.0]) for n in (1, 2, 3)])
    assert (reroll.take(1.0, limit=1), list(reroll.waiting)) == ([1], [2, 3])


def test_a_run_tries_failed_prompts_again_and_remembers_them_over_a_resume(tmp_path):
    section = {"reroll_start": 0.25, "reroll_groups": 1}
    options = {"rewards": [never_dogs], "section": section, "save_strategy": "steps", "save_steps": 6}
    trainer = online_trainer(tmp_path, max_steps=12, **options)
    numbers = []
    trainer.rollouts.on_rollout.append(lambda rollout, step: numbers.append([g.row["answer"] for g in rollout.groups]))
    trainer.train()
    dogs = sum("dogs" in words for words in numbers)
    plain = online_trainer(tmp_path / "plain", rewards=[never_dogs], max_steps=12)
    unrolled = []
    plain.rollouts.on_rollout.append(lambda rollout, step: unrolled.append([g.row["answer"] for g in rollout.groups]))
    plain.train()
    assert dogs > sum("dogs" in words for words in unrolled)
    later = online_trainer(tmp_path, max_steps=12, **options)
    later.rollouts.restore(tmp_path / "checkpoint-6")
    saved = json.loads((tmp_path / "checkpoint-6" / "rollouts.json").read_text())["producer"]["reroll"]
    later.rollouts.restore(tmp_path / "checkpoint-6")
    assert list(later.rollouts.producer.reroll.waiting) == saved != []
