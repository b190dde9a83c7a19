"""Prompts to scored groups."""

import threading

import pytest
import torch

from light_rewards import even_tokens, short
from made_rollouts import WORDS, online_trainer
from upweight.errors import UserError
from upweight.methods import GDPO, GRPO


def producer_of(folder, **options):
    return online_trainer(folder, **options).rollouts.producer


def tokens_of(rollout):
    return [one.ids for group in rollout.groups for one in group.completions]


def test_rewards_see_prompts_completions_and_columns(tmp_path):
    seen = {}

    def look(*, prompts, completions, completion_ids, answers, trainer_state, log_extra, log_metric, **columns):
        seen.update(locals())
        log_extra("words", [len(text) for text in completions])
        log_metric("mine", 3.0)
        return [float(len(ids)) for ids in completion_ids]

    producer = producer_of(tmp_path, rewards=[look])
    rollout = producer.produce(4, trainer_state="state")
    assert seen["prompts"][0].startswith("say ")
    assert seen["answers"] == [word for group in rollout.groups for word in [group.row["answer"]] * 4]
    assert seen["completion_ids"] == tokens_of(rollout)
    assert seen["completions"] == [producer.decode(ids) for ids in tokens_of(rollout)]
    assert seen["columns"]["answer"][0] in WORDS
    assert "prompt_ids" not in seen["columns"]
    assert rollout.metrics["mine"] == 3.0
    assert len(rollout.groups[0].extras["words"]) == 4
    assert {version for group in rollout.groups for one in group.completions for version in one.versions} <= {0, 4}


def test_seconds_and_failures_of_several_calls_add_up_and_other_metrics_are_averaged(tmp_path):
    calls = []

    def look(completions, log_metric, **_):
        calls.append(len(completions))
        for name in ("rewards/look/seconds", "rewards/look/failed", "rewards/look/other"):
            log_metric(name, 2.0)
        return [0.0] * len(completions)

    found = producer_of(tmp_path, rewards=[look], wanted=16, section={"streaming": True}).produce(0)
    assert len(calls) > 1
    assert found.metrics["rewards/look/other"] == 2.0
    assert found.metrics["rewards/look/failed"] == 2.0 * len(calls)
    assert found.metrics["rewards/look/seconds"] >= 2.0 * len(calls)


def test_what_compiling_took_is_counted_by_rollout(tmp_path):
    class Clock:
        compile_seconds = 5.0

    producer, clock = producer_of(tmp_path), Clock()
    assert producer.produce(0).metrics["rollout/compile_seconds"] == 0  # on a CPU nothing is compiled
    source = producer.completion_source

    def sampling_compiles(*args, **options):
        clock.compile_seconds += 2.0
        return source(*args, **options)

    producer.compiles, producer.completion_source = clock, sampling_compiles
    assert producer.produce(0).metrics["rollout/compile_seconds"] == 2.0


def test_messages_are_answered_by_messages(tmp_path):
    seen = []

    def look(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    producer = producer_of(tmp_path, rewards=[look])
    producer.rows = producer.rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    producer.produce(0)
    assert all(len(one) == 1 and one[0]["role"] == "assistant" for one in seen)
    assert all(isinstance(one[0]["content"], str) for one in seen)


def test_advantages_follow_the_method_over_the_whole_rollout(tmp_path):
    for method in (GRPO(**{"num_generations": 4, "max_completion_length": 5}),
                   GDPO(**{"num_generations": 4, "max_completion_length": 5})):  # fmt: skip
        rollout = producer_of(tmp_path, method=method, wanted=16).produce(0)
        rewards_SR = torch.cat([group.rewards_SR for group in rollout.groups])
        right_S = method.advantages(rewards_SR, torch.arange(4).repeat_interleave(4))
        assert torch.equal(torch.cat([group.advantage_S for group in rollout.groups]), right_S)


def test_a_seed_fixes_what_is_sampled_and_rollouts_differ(tmp_path):
    first, again = producer_of(tmp_path), producer_of(tmp_path)
    assert tokens_of(first.produce(0)) == tokens_of(again.produce(0))
    assert tokens_of(first.produce(0)) == tokens_of(again.produce(0))
    assert tokens_of(first.produce(0)) != tokens_of(producer_of(tmp_path, seed=6).produce(0))


def test_a_producer_goes_on_from_its_state(tmp_path):
    whole, later = producer_of(tmp_path), producer_of(tmp_path)
    whole.produce(0)
    later.restore(whole.state())
    assert tokens_of(whole.produce(0)) == tokens_of(later.produce(0))
    assert later.tokens == whole.tokens


def test_streaming_scores_each_group_once_and_alike(tmp_path):
    calls = []

    def counted(completion_ids, **_):
        calls.append(len(completion_ids))
        return even_tokens(completion_ids)

    plain = producer_of(tmp_path, rewards=[even_tokens, short], wanted=16).produce(0)
    streamed = producer_of(
        tmp_path, rewards=[counted, short], wanted=16, section={"streaming": True, "streaming_groups": 2}
    ).produce(0)
    assert sum(calls) == 16
    assert max(calls) <= 8
    assert tokens_of(plain) == tokens_of(streamed)
    for one, other in zip(plain.groups, streamed.groups, strict=True):
        assert torch.equal(one.rewards_SR, other.rewards_SR)
        assert torch.equal(one.advantage_S, other.advantage_S)


def test_dynamic_sampling_replaces_groups_without_signal_within_its_rounds(tmp_path):
    def only_zebras(prompts, completion_ids, **_):
        told = zip(prompts, completion_ids, strict=True)
        return [float(len(set(ids)) + ids[0]) if "zebra" in prompt else 0.0 for prompt, ids in told]

    def words(rounds):
        producer = producer_of(tmp_path, rewards=[only_zebras], wanted=8, section={"dynamic_sampling": rounds})
        rollout = producer.produce(0)
        return [group.row["answer"] for group in rollout.groups], rollout.metrics, producer.order.position

    plain, metrics, position = words(0)
    assert plain != ["zebra", "zebra"]
    assert position == 2
    assert metrics["frac_reward_zero_std"] >= 0.5
    found, metrics, position = words(12)
    assert found == ["zebra", "zebra"]
    assert metrics["frac_reward_zero_std"] == 0
    assert metrics["rollout/sampled_again"] == position - 2


def test_a_reward_that_fails_on_everything_stops_the_run(tmp_path):
    def broken(completions, **_):
        raise ValueError("no such thing")

    with pytest.raises(UserError, match=r"broken.*no such thing"):
        producer_of(tmp_path, rewards=[broken]).produce(0)


def test_scoring_runs_beside_the_writing_when_it_streams(tmp_path):
    scored = threading.Event()

    def tell(completions, **_):
        scored.set()
        return [0.0] * len(completions)

    producer = producer_of(tmp_path, rewards=[tell], wanted=32, section={"streaming": True})
    completion_source, heard = producer.completion_source, []

    def stopped_after_each(groups, count, sampling, done):
        def after_one(place):
            done(place)
            heard.append(scored.wait(60))  # the writing goes on when this group has its rewards
            scored.clear()

        completion_source(groups, count, sampling, after_one)

    producer.completion_source = stopped_after_each
    producer.produce(0)
    assert heard == [True] * 8
