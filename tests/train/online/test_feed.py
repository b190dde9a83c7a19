"""Rollouts in the loop: against a plain loop, in any cut, over a resume."""

import logging

import numpy as np
import pytest
import torch

from light_rewards import each_even_token, equal_rewards, even_tokens, short
from made_rollouts import logged, online_trainer, resumed_as_whole
from made_runs import largest_difference, on_ranks, weights_of
from made_tokenizers import byte_tokenizer
from slow_cases import slow_except
from upweight.errors import UserError
from upweight.methods import GDPO, GRPO, RLOO
from upweight.rewards.builtin.adaptive import AdaptiveReward
from upweight.rewards.load import as_rewards
from upweight.rewards.scorer import Scorer
from upweight.sampler.in_process import InProcess
from upweight.train.distributed.ranks import join_ranks
from upweight.train.recording.samples import samples_of_step
from upweight.types import Sampling


def plain_loop(trainer, steps):
    """GRPO with its defaults, one prompt and one sequence at a time, from the formulas."""
    model, plan, rows = trainer.model, trainer.rollouts.producer.plan, trainer.rollouts.producer.rows
    tokenizer, sampler = trainer.processing_class, InProcess(trainer.model, trainer.processing_class)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    order = np.concatenate([np.random.default_rng((5, epoch)).permutation(len(rows)) for epoch in range(9)])
    for step in range(steps):
        seed = int(np.random.SeedSequence((5, step, 0)).generate_state(1)[0])
        numbers = order[step * plan.groups : (step + 1) * plan.groups]
        chosen = [rows[int(number)] for number in numbers]
        sampling = Sampling(6, temperature=0.7, seed=seed)
        written = sampler.generate([row["prompt_ids"] for row in chosen], plan.group_size, sampling)
        terms, tokens = [], 0
        for row, completions in zip(chosen, written, strict=True):
            ids = [one.ids for one in completions]
            texts = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
            reward = torch.tensor(even_tokens(ids)) + torch.tensor(short(texts))
            advantages = (reward - reward.mean()) / (reward.std() + 1e-4)
            for own, advantage in zip(ids, advantages, strict=True):
                whole = torch.tensor(row["prompt_ids"] + own)
                logps = (model(input_ids=whole[None]).logits[0, :-1] / 0.7).log_softmax(-1)
                logps = logps.gather(1, whole[1:, None])[-len(own) :, 0]
                terms.append(-(logps - logps.detach()).exp().sum() * advantage)
                tokens += len(own)
        optimizer.zero_grad()
        (torch.stack(terms).sum() / tokens).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_without_running_ahead_it_is_a_plain_loop(tmp_path):
    ours = online_trainer(tmp_path / "a", section={"temperature": 0.7}, max_steps=4)
    ours.train()
    plain = online_trainer(tmp_path / "b", section={"temperature": 0.7}, max_steps=4)
    assert largest_difference(weights_of(ours), plain_loop(plain, 4)) < 1e-5


@pytest.mark.parametrize(("beta", "watched", "skips"), [(0.0, "group_reward_std", True), (0.1, "kl", False)])
def test_a_run_begins_with_what_to_watch_and_says_when_nothing_can_be_skipped(tmp_path, caplog, beta, watched, skips):
    caplog.set_level(logging.INFO, "upweight")
    logging.getLogger("upweight").propagate = True
    online_trainer(tmp_path, method=GRPO(**{"num_generations": 4, "max_completion_length": 6, "beta": beta}))
    (line,) = [line for line in caplog.messages if "no measure of progress" in line]
    assert line.endswith(watched)
    assert any("for the sake of trl.beta" in line for line in caplog.messages) != skips


def plain(log_ratio, advantages):
    return -log_ratio.exp() * advantages


def near(log_ratio, advantages, ref_logps):
    return -log_ratio.exp() * advantages + 0 * ref_logps


def skipping(log_ratio, advantages):
    return -log_ratio.exp() * advantages


skipping.skip_zero_advantage = True


@pytest.mark.parametrize(
    ("loss", "watched", "forwarded"),
    [
        (plain, "group_reward_std", "write 'plain.skip_zero_advantage = True' below it, and they are skipped"),
        (near, "kl", "test_feed.near' may act on them; if it has no gradient at an advantage of 0"),
        (plain, "kl", "for the sake of trl.loss_type and trl.beta; trl.skip_zero_advantage_batches has nothing"),
        (skipping, "group_reward_std", None),
    ],
)
def test_a_run_with_a_users_loss_names_what_is_logged_and_how_to_skip(tmp_path, caplog, loss, watched, forwarded):
    caplog.set_level(logging.INFO, "upweight")
    logging.getLogger("upweight").propagate = True
    beta = 0.1 if "trl.beta" in (forwarded or "") else 0.0
    method = GRPO(**{"num_generations": 4, "max_completion_length": 6, "loss_type": loss, "beta": beta})
    trainer = online_trainer(tmp_path, method=method, max_steps=1)
    (line,) = [line for line in caplog.messages if "no measure of progress" in line]
    assert line.endswith(watched)
    lines = [line for line in caplog.messages if "are forwarded like all others" in line]
    assert len(lines) == (forwarded is not None)
    assert not lines or forwarded in lines[0]
    trainer.train()
    assert ("kl" in logged(trainer)[0]) == (watched == "kl")


@pytest.mark.parametrize("budget", [16, 40])
def test_any_cut_into_forwards_gives_the_same_weights(tmp_path, budget):
    whole, cut = (online_trainer(tmp_path / str(size), wanted=16, budget=size) for size in (4096, budget))
    whole.train()
    cut.train()
    assert largest_difference(weights_of(whole), weights_of(cut)) < 1e-5


def test_leaving_out_what_cannot_contribute_changes_nothing(tmp_path):
    weights = []
    for skip in (True, False):
        trainer = online_trainer(
            tmp_path / str(skip), rewards=[equal_rewards], section={"skip_zero_advantage": skip}, wanted=8
        )
        trainer.train()
        weights.append(weights_of(trainer))
        share = [row.get("forwarded_share", 1.0) for row in logged(trainer)]
        assert max(share) < 1 if skip else share == [1.0] * 3
    assert largest_difference(*weights) < 1e-6


def test_a_step_without_any_signal_moves_nothing(tmp_path):
    trainer = online_trainer(tmp_path, rewards=[lambda completions, **_: [1.0] * len(completions)], max_steps=2)
    before = weights_of(trainer)
    trainer.train()
    assert largest_difference(before, weights_of(trainer)) == 0
    assert [row["forwarded_share"] for row in logged(trainer)] == [0.0, 0.0]
    assert [row["skipped_zero_adv_batches"] for row in logged(trainer)] == [1.0, 1.0]
    assert [row["frac_reward_zero_std"] for row in logged(trainer)] == [1.0, 1.0]


def test_several_steps_of_a_rollout_share_one_denominator_and_compare_with_its_policy(tmp_path):
    trainer = online_trainer(tmp_path, wanted=16, iterations=2, max_steps=4)
    trainer.train()
    rollouts = trainer.rollouts
    assert rollouts.producer.num_rollouts == 1
    tokens = sum(len(one.ids) for group in rollouts.current.groups for one in group.completions)
    assert rollouts.counts == {"rollout_tokens": tokens / 2}
    first, _, third, _ = logged(trainer)
    # The first step has the rollout's own policy before it, the second pass does not.
    assert abs(first["loss"]) > 0
    assert all(unit.samples[0].old_logps is not None for unit in rollouts.units)
    assert third["loss"] != pytest.approx(first["loss"], abs=1e-6)


def test_truncated_completions_can_be_left_out_of_the_loss(tmp_path):
    method = GRPO(**{"num_generations": 4, "max_completion_length": 3, "mask_truncated_completions": True})
    trainer = online_trainer(tmp_path, method=method, max_steps=1)
    trainer.train()
    for unit, one in zip(
        trainer.rollouts.units,
        (one for group in trainer.rollouts.current.groups for one in group.completions),
        strict=True,
    ):
        assert bool(unit.samples[0].loss_mask.any()) == one.finished


@pytest.mark.parametrize("top", [1.0, 0.5])
def test_steps_in_which_every_completion_was_cut_short_train_nothing(tmp_path, top):
    policy = {"num_generations": 4, "max_completion_length": 1, "mask_truncated_completions": True}
    method = GRPO(**{**policy, "top_entropy_quantile": top, "loss_type": "grpo"})
    for skip in (True, False):
        trainer = online_trainer(tmp_path, method=method, section={"skip_zero_advantage": skip})
        trainer.train()
        assert [line["grad_norm"] for line in logged(trainer)] == [0.0] * 3
        assert not trainer.runner.row_check.checked


def test_the_first_step_is_checked_where_its_first_row_has_nothing_to_score(tmp_path):
    method = GRPO(**{"num_generations": 4, "max_completion_length": 3, "mask_truncated_completions": True})
    options = {"rollout_func": first_is_cut_short, "section": {"skip_zero_advantage": False}, "budget": 8}
    trainer = online_trainer(tmp_path, method=method, max_steps=1, **options)
    trainer.train()
    assert trainer.runner.row_check.checked
    assert logged(trainer)[0]["grad_norm"] > 0


def first_is_cut_short(prompts, trainer):
    end = byte_tokenizer("chatml").eos_token_id
    ends = [[] if number == 0 else [end] for number in range(len(prompts))]
    ids = [[10 + number, 11, *end] for number, end in enumerate(ends)]
    return {"prompt_ids": [[1, 2]] * len(prompts), "completion_ids": ids, "logprobs": None}


def test_an_evaluation_leaves_the_state_of_rewards_alone(tmp_path):
    reward = AdaptiveReward(short)
    trainer = online_trainer(tmp_path, rewards=(even_tokens,), evaluation=3, max_steps=1)
    trainer.rollouts.producer.scorer = Scorer(as_rewards([reward]))
    trainer.train()
    before = reward.state()
    trainer.evaluate()
    assert reward.state() == before
    assert before["scored"] == 8


@pytest.mark.parametrize(("wanted", "iterations"), slow_except([(8, 2)], [(8, 1), (16, 1), (8, 2), (16, 2)]))
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, wanted, iterations):
    resumed_as_whole(online_trainer, tmp_path, 7, 3, wanted=wanted, iterations=iterations)


@pytest.mark.parametrize(("wanted", "iterations"), slow_except([(16, 2)], [(8, 1), (16, 2)]))
def test_a_resumed_run_whose_rewards_count_the_drift_is_the_uninterrupted_one(tmp_path, wanted, iterations):
    method = RLOO(num_generations=4, beta=0.5, max_completion_length=6)
    whole = resumed_as_whole(online_trainer, tmp_path, 5, 3, method=method, wanted=wanted, iterations=iterations)
    assert all("kl" in line for line in logged(whole))
    groups = whole.rollouts.current.groups
    rewards_SR = torch.cat([group.rewards_SR for group in groups])
    plain_S = method.advantages(rewards_SR, torch.arange(len(groups)).repeat_interleave(4))
    assert not torch.allclose(plain_S, torch.cat([group.advantage_S for group in groups]))


def test_evaluation_samples_held_out_prompts_and_leaves_training_alone(tmp_path):
    weights = []
    for evaluation in (0, 3):
        often = {"eval_strategy": "steps", "eval_steps": 1} if evaluation else {}
        trainer = online_trainer(
            tmp_path / str(evaluation), evaluation=evaluation, section={"num_generations_eval": 2}, **often
        )
        trainer.train()
        weights.append(weights_of(trainer))
    found = trainer.evaluate()
    assert {"eval_reward", "eval_reward_std", "eval_rewards/short/pass@1", "eval_rewards/even_tokens/pass@2"} <= set(
        found
    )
    assert largest_difference(*weights) == 0


def test_an_adapter_learns_online(tmp_path):
    trainer = online_trainer(tmp_path, adapter=True)
    before = weights_of(trainer)
    trainer.train()
    assert largest_difference(before, weights_of(trainer)) > 0


def train_on_ranks(folder, world):
    """The same global batch whatever the number of ranks; rank 0 keeps the weights."""
    size, rewards = {"num_generations": 4, "max_completion_length": 6}, (even_tokens, short)
    methods = {
        "grpo": (GRPO(**size, beta=0.1), rewards),
        "gdpo": (GDPO(**size), rewards),
        "by token": (GRPO(**size, reward_to_go=True, gamma=0.9), (each_even_token, short)),
    }
    join_ranks(60)
    for name, (method, functions) in methods.items():
        sizes = {"step": 8 // world, "wanted": 16 // world, "world": world}
        trainer = online_trainer(f"{folder}/{name}", method=method, rewards=functions, **sizes)
        trainer.train()
        if trainer.is_world_process_zero():
            torch.save([weights_of(trainer), logged(trainer)], f"{folder}/{name}-{world}.pt")


@pytest.mark.slow
def test_two_ranks_sample_and_learn_what_one_does(tmp_path):
    for world in (1, 2):
        on_ranks(train_on_ranks, world, str(tmp_path), world)
    for name in ("grpo", "gdpo", "by token"):
        (one, logs), (two, others) = (torch.load(tmp_path / f"{name}-{world}.pt") for world in (1, 2))
        assert largest_difference(one, two) < 1e-5
        for row, other in zip(logs, others, strict=True):
            assert row.keys() == other.keys()
            assert other == pytest.approx(row, abs=1e-4), row
            for key in ("loss", "grad_norm"):
                assert other[key] == pytest.approx(row[key], rel=1e-5, abs=1e-6)


def test_a_prompt_that_the_model_cannot_hold_is_told_of_before_training(tmp_path):
    with pytest.raises(UserError, match="with 6 new ones exceeds the 256 positions of the model"):
        online_trainer(tmp_path, rows=5, words=("a", "be", "cat", "dogs", "zq" * 400))


def test_the_rows_of_a_step_are_those_that_it_was_trained_on(tmp_path):
    trainer = online_trainer(tmp_path, step=4, wanted=8, max_steps=4)
    trained = []
    next_step = trainer.rollouts.next_step

    def noted(*arguments):
        step = next_step(*arguments)
        trained.append([one.ids.tolist() for unit in step["units"] for one in unit.samples])
        return step

    trainer.rollouts.next_step = noted
    trainer.train()
    assert [row["ids"] for step in (2, 3) for row in samples_of_step(trainer, step)] == trained[2] + trained[3]
    assert len(trained[3]) == 4
    assert list(samples_of_step(trainer, 1)) == []  # of a rollout that is gone
