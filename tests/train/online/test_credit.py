"""Rewards by token in the loop: against formulas, over a resume, with replay."""

import json

import torch

from light_rewards import each_even_token as even
from made_rollouts import logged, online_trainer, resumed_as_whole
from made_runs import largest_difference, weights_of
from upweight.methods import GRPO

SETTINGS = {"num_generations": 4, "max_completion_length": 6, "reward_to_go": True}


def same_sum(completion_ids, **kwargs):
    """One, at a token that differs between completions."""
    return [[(1 + sum(ids) % len(ids), 1.0)] for ids in completion_ids]


def trained(folder, **options):
    trainer = online_trainer(folder, **{"method": GRPO(**SETTINGS), "rewards": [even]} | options)
    trainer.train()
    return trainer


def test_a_step_is_the_plain_policy_gradient_of_rewards_to_go(tmp_path):
    trainer = online_trainer(
        tmp_path, method=GRPO(**SETTINGS, gamma=0.9, scale_rewards="none"), rewards=[even], max_steps=1
    )
    model = trainer.model
    before = {name: value.clone() for name, value in weights_of(trainer).items()}
    trainer.train()
    after, rollout = weights_of(trainer), trainer.rollouts.current
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(before[name])
    terms, tokens = [], 0
    for group in rollout.groups:
        ids = [one.ids for one in group.completions]
        longest = max(map(len, ids))
        curves = []
        for own in ids:
            values = [sum(0.9 ** (u - t) * (own[u] % 2 == 0) for u in range(t, len(own))) for t in range(len(own))]
            curves.append(values + [values[-1]] * (longest - len(own)))
        advantages = torch.tensor(curves) - torch.tensor(curves).mean(0)
        for own, advantage in zip(ids, advantages, strict=True):
            whole = torch.tensor(group.prompt_ids + own)
            logps = model(input_ids=whole[None]).logits[0, :-1].log_softmax(-1)
            logps = logps.gather(1, whole[1:, None])[-len(own) :, 0]
            terms.append(-((logps - logps.detach()).exp() * advantage[: len(own)]).sum())
            tokens += len(own)
    (torch.stack(terms).sum() / tokens).backward()
    expected = {name: value.detach() - 0.5 * value.grad for name, value in model.named_parameters()}
    assert largest_difference(after, expected) < 1e-5


def test_groups_of_equal_sums_are_trained_on_by_where_they_earned(tmp_path):
    trainer = trained(tmp_path / "to_go", rewards=[same_sum], max_steps=1)
    (row,) = logged(trainer)
    assert row["forwarded_share"] > 0
    assert row["frac_reward_zero_std"] < 1
    still = trained(
        tmp_path / "sums", method=GRPO(**SETTINGS | {"reward_to_go": False}), rewards=[same_sum], max_steps=1
    )
    assert logged(still)[0]["forwarded_share"] == 0
    assert largest_difference(weights_of(still), weights_of(trainer)) > 0


def test_any_cut_into_forwards_gives_the_same_weights(tmp_path):
    whole, cut = (trained(tmp_path / str(size), wanted=16, budget=size) for size in (4096, 16))
    assert largest_difference(weights_of(whole), weights_of(cut)) < 1e-5


def test_a_resume_within_a_rollout_with_replay_and_rollouts_ahead_is_the_whole_run(tmp_path):
    section = {"replay_size": 4, "replay_max_age": 8, "async_prefetch": True, "prefetch_depth": 1}

    def make(folder, **options):
        return online_trainer(
            folder, method=GRPO(**SETTINGS), rewards=[even, same_sum], section=section, wanted=16, **options
        )

    whole = resumed_as_whole(make, tmp_path, 6, 3)
    assert any(one.advantages for group in whole.rollouts.current.groups for one in group.completions)
    state = json.loads((tmp_path / "whole" / "checkpoint-3" / "rollouts.json").read_text())
    assert all(one["advantages"] for group in state["current"]["groups"] for one in group["completions"])
