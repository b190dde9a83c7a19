"""Advantages of tokens against a direct computation, and their way into training."""

import json

import pytest
import torch

from upweight.engine.packing import build_batch
from upweight.methods import GDPO, GRPO
from upweight.rollout.credit import credit_tokens
from upweight.rollout.rollout import group_from_plain, group_to_plain
from upweight.rollout.summary import has_signal
from upweight.rollout.units import units_of_groups
from upweight.types import Completion, Group

SIZES = (3, 4)


def written(length, **more):
    return Completion(list(range(1, length + 1)), [], [], finished=True, **more)


def made_groups(seed=0, rewards=2, credited=True):
    """Groups of completions of several lengths; the first reward is by part, the others are numbers."""
    random = torch.Generator().manual_seed(seed)
    groups = []
    for number, size in enumerate(SIZES):
        lengths = torch.randint(2, 7, (size,), generator=random).tolist()
        values_SR = torch.rand(size, rewards, generator=random)
        group = Group(number, {}, [90, 91], [written(length) for length in lengths], values_SR)
        for at, length in enumerate(lengths if credited else ()):
            steps = sorted({int(x) for x in torch.randint(1, length + 1, (3,), generator=random)})
            group.credits[at, 0] = [(end, float(torch.rand((), generator=random))) for end in steps]
            values_SR[at, 0] = sum(value for _, value in group.credits[at, 0])
        groups.append(group)
    return groups


def given_advantages(method, groups):
    """Set and return the advantages of each token, by completion."""
    sizes = torch.tensor([len(group.completions) for group in groups])
    group_S = torch.repeat_interleave(torch.arange(len(groups)), sizes)
    advantage_S = method.advantages(torch.cat([group.rewards_SR for group in groups]), group_S)
    for group, part_S in zip(groups, advantage_S.split(sizes.tolist()), strict=True):
        group.advantage_S = part_S
    credit_tokens(groups, group_S, method, method.discount)
    return [one.advantages for group in groups for one in group.completions]


def to_go(group, at, reward, place, gamma):
    """The discounted rewards from a token (counted from 0) on; after the end, from the last token on."""
    last = len(group.completions[at].ids)
    place = min(place, last - 1)
    pairs = group.credits.get((at, reward), [(last, float(group.rewards_SR[at, reward]))])
    return sum(gamma ** (end - 1 - place) * value for end, value in pairs if end > place)


def direct(groups, gamma, scale, weights=(1.0, 1.0), *, rloo=False, whole=False):
    """The formula of the docs, one number at a time; `whole`: also for places after a completion's end."""
    longest = max(len(one.ids) for group in groups for one in group.completions)

    def value(group, at, place):
        return sum(weight * to_go(group, at, r, place, gamma) for r, weight in enumerate(weights))

    def columns(members):
        return [torch.tensor([value(*who, place) for who in members]).double() for place in range(longest)]

    members = [[(group, at) for at in range(len(group.completions))] for group in groups]
    of_batch = max(float(column.std()) for column in columns([who for group in members for who in group]))
    advantages = []
    for group in members:
        each = columns(group)
        deviation = max(float(column.std()) for column in each)
        divisor = {"group": deviation + 1e-4, "batch": of_batch + 1e-4, "none": 1.0}[scale]
        for at, (one, number) in enumerate(group):
            places = range(longest if whole else len(one.completions[number].ids))
            if rloo:
                others = [(c.sum() - c[at]) / (len(c) - 1) for c in each]
                advantages.append([float(each[t][at] - others[t]) for t in places])
            else:
                advantages.append([float((each[t][at] - each[t].mean()) / divisor) for t in places])
    return advantages


def assert_same(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_each_token_is_compared_with_the_group_at_its_place(gamma, scale):
    groups = made_groups()
    method = GRPO(reward_to_go=True, gamma=gamma, scale_rewards=scale, reward_weights=(0.5, 2.0))
    assert_same(given_advantages(method, groups), direct(groups, gamma, scale, (0.5, 2.0)))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_the_others_can_be_the_baseline(gamma):
    groups = made_groups(1)
    method = GRPO(reward_to_go=True, gamma=gamma, advantage_estimator="rloo")
    assert_same(given_advantages(method, groups), direct(groups, gamma, "none", rloo=True))


@pytest.mark.parametrize("settings", [{}, {"scale_rewards": "batch"}, {"advantage_estimator": "rloo"}, None])
def test_a_reward_at_the_last_token_is_a_number(settings):
    method = GDPO(reward_to_go=True) if settings is None else GRPO(reward_to_go=True, **settings)
    groups, plain = made_groups(2, credited=False), made_groups(2, credited=False)
    for group in groups:
        for at, one in enumerate(group.completions):
            group.credits[at, 0] = [(len(one.ids), float(group.rewards_SR[at, 0]))]
    got = given_advantages(method, groups)
    assert given_advantages(method, plain) == [[]] * sum(SIZES)  # nothing to say by token
    by_sum = torch.cat([group.advantage_S for group in plain]).tolist()
    for tokens, advantage in zip(got, by_sum, strict=True):
        assert tokens == pytest.approx([advantage] * len(tokens), abs=1e-6)


def test_gdpo_normalises_each_reward_before_it_sums():
    groups = made_groups(3)
    got = given_advantages(GDPO(reward_to_go=True, gamma=0.9), groups)
    apart = [direct(groups, 0.9, "group", weights, whole=True) for weights in ((1.0, 0.0), (0.0, 1.0))]
    summed = torch.tensor(apart).double().sum(0)
    scaled = (summed - summed.mean(0)) / (float(summed.std(0).max()) + 1e-4)
    assert_same(got, [row[: len(one)].tolist() for row, one in zip(scaled, got, strict=True)])


def test_the_same_sum_earned_elsewhere_is_a_signal_that_is_trained_on():
    early, late = written(3), written(3)
    group = Group(0, {}, [9], [early, late], torch.tensor([[1.0], [1.0]]))
    assert not has_signal(group)
    group.credits = {(0, 0): [(1, 1.0)], (1, 0): [(3, 1.0)]}
    assert has_signal(group)
    method = GRPO(reward_to_go=True, scale_rewards="none")
    assert given_advantages(method, [group]) == [[0.0, -0.5, -0.5], [0.0, 0.5, 0.5]]
    assert group.advantage_S.tolist() == [0.0, 0.0]
    (first, second) = units_of_groups([group], mask_truncated=False, sampler_logps=False)
    assert method.contributes(first.samples[0])
    assert build_batch([first, second]).advantage_T.tolist() == [0.0, -0.5, -0.5, 0.0, 0.5, 0.5]


def test_tokens_of_an_environment_count_as_places_and_are_not_trained_on():
    turns = written(4, sampled=[True, False, False, True])
    group = Group(0, {}, [9], [turns, written(2)], torch.tensor([[3.0], [0.0]]), credits={(0, 0): [(1, 1.0), (4, 2.0)]})
    given_advantages(GRPO(reward_to_go=True, scale_rewards="none"), [group])
    (sample,) = units_of_groups([group], mask_truncated=False, sampler_logps=False)[0].samples
    assert sample.token_advantages.tolist() == [1.5, 1.0]


def test_earlier_segments_have_the_advantage_of_the_first_token_and_the_prompt_has_none():
    early = written(2)
    late = Completion([5, 6, 7], [], [], finished=True, sampled=[False, True, True], earlier=[early], prompt_len=1)
    group = Group(0, {}, [9], [late, written(2)], torch.tensor([[3.0], [0.0]]), credits={(0, 0): [(1, 1.0), (2, 2.0)]})
    given_advantages(GRPO(reward_to_go=True, scale_rewards="none"), [group])
    last, first = units_of_groups([group], mask_truncated=False, sampler_logps=False)[0].samples
    assert last.token_advantages.tolist() == [1.5, 1.0]
    assert first.token_advantages.tolist() == [1.5, 1.5]


def test_a_completion_without_a_reward_or_without_tokens_changes_nothing():
    group = Group(0, {}, [9], [written(0), written(3), written(2, failure="lost")])
    group.rewards_SR = torch.tensor([[1.0], [2.0], [torch.nan]])
    group.credits = {(1, 0): [(2, 2.0)]}
    assert given_advantages(GRPO(reward_to_go=True, scale_rewards="none"), [group]) == [
        [],
        [0.5, 0.5, -0.5],
        [0.0, 0.0],
    ]


def test_a_checkpoint_keeps_the_advantages_of_tokens():
    (group, _) = groups = made_groups(4)
    given_advantages(GRPO(reward_to_go=True), groups)
    again = group_from_plain(json.loads(json.dumps(group_to_plain(group))), {0: {}})
    assert [one.advantages for one in again.completions] == [one.advantages for one in group.completions]


def test_a_discount_needs_rewards_that_follow():
    with pytest.raises(ValueError, match=r"trl\.gamma discounts rewards that follow a token: set trl\.reward_to_go"):
        GRPO(gamma=0.9)
