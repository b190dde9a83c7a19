"""Features and their rewards against the formulas written out in plain torch, one sample at a time."""

import pytest
import torch

from upweight.methods import EBFT
from upweight.methods.formulas.features import leave_one_out_crowding, pooled, pooled_positions, whitened

SIZE, GROUPS, WIDTH = 4, 3, 10
BEGIN, ANSWER, END = 3, 5, 14


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def unit(vector):
    return vector / vector.norm()


def plain_pooling(method, states):
    """Features of one text from all its hidden states, normalised one by one."""
    states = torch.stack([unit(state) for state in states])
    text = states[BEGIN:END]
    if method == "last_token":
        return unit(text[-1])
    if method == "mean_pooling":
        return unit(text.mean(0))
    if method == "completion_mean":
        return unit(states[ANSWER:END].mean(0))
    length = END - BEGIN
    return unit(torch.cat([text[length // 4], text[length // 2], text[3 * length // 4]]))


def plain_whitening(features, target):
    """The pseudo-inverse root of the second moment, built as a matrix."""
    moment = sum(torch.outer(one, one) for one in features.double()) / len(features)
    square, basis = torch.linalg.eigh(moment)
    root = sum(torch.outer(basis[:, n], basis[:, n]) / value.sqrt() for n, value in enumerate(square) if value > 1e-9)
    return features.double() @ root, root @ target.double()


def plain_rewards(features, target, alignment_coef, diversity_coef, whiten):
    """Rewards, and mean alignment, crowding and distance, of one group."""
    distance = (features.mean(0) - target).square().sum()
    if whiten:
        features, target = plain_whitening(features, target)
    rewards, cosines, crowds = [], [], []
    for place, own in enumerate(features):
        cosines.append(own @ target / own.norm() / target.norm())
        crowds.append(sum(own @ other for n, other in enumerate(features) if n != place) / (len(features) - 1))
        rewards.append(2 * alignment_coef * cosines[-1] - 2 * diversity_coef * crowds[-1])
    return torch.stack(rewards), torch.stack(cosines), torch.stack(crowds), distance


@pytest.mark.parametrize("method", ["last_token", "mean_pooling", "completion_mean", "concat"])
def test_pooling(method):
    texts = drawn(3, 20, WIDTH)
    positions = pooled_positions(method, BEGIN, ANSWER, END)
    states_TF = texts[:, positions].flatten(0, 1)
    sequence_T = torch.arange(3).repeat_interleave(len(positions))
    right = torch.stack([plain_pooling(method, text) for text in texts])
    torch.testing.assert_close(pooled(states_TF, sequence_T, 3, method), right)


def test_a_text_of_one_token_has_features_by_every_method():
    assert pooled_positions("concat", 4, 4, 5).tolist() == [4, 4, 4]
    assert pooled_positions("mean_pooling", 4, 4, 5).tolist() == [4]
    assert pooled_positions("completion_mean", 0, 4, 5).tolist() == [4]


@pytest.mark.parametrize("whiten", [False, True])
def test_rewards(whiten):
    method = EBFT(alignment_coef=0.7, diversity_coef=0.3, use_whitening=whiten)
    features, targets = drawn(GROUPS * SIZE, WIDTH), drawn(GROUPS, WIDTH)
    rewards_SR, metrics = method.feature_rewards(features, targets, SIZE)
    right = [
        plain_rewards(own, target, 0.7, 0.3, whiten) for own, target in zip(features.split(SIZE), targets, strict=True)
    ]
    rewards, cosines, crowds = (torch.cat([one[part] for one in right]).float() for part in range(3))
    torch.testing.assert_close(rewards_SR.sum(1), rewards, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(metrics["ebft/alignment"], cosines, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(metrics["ebft/diversity"], crowds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(metrics["ebft/cfm_loss"], torch.stack([one[3] for one in right]))


def test_whitening_by_few_samples_leaves_crowding_to_those_that_repeat_each_other():
    features, target = drawn(SIZE, WIDTH), drawn(1, WIDTH)
    white, _ = whitened(features, target, SIZE)
    torch.testing.assert_close(white @ white.T, SIZE * torch.eye(SIZE), atol=1e-5, rtol=1e-5)
    features[1] = features[0]
    white, _ = whitened(features, target, SIZE)
    product = white @ white.T
    right = torch.zeros(SIZE, SIZE)
    right[:2, :2], right[2, 2], right[3, 3] = SIZE / 2, SIZE, SIZE
    torch.testing.assert_close(product, right, atol=1e-5, rtol=1e-5)


def test_whitening_does_not_care_for_the_scale_of_directions():
    features, target = drawn(SIZE, SIZE), drawn(1, SIZE)
    scale = torch.diag(torch.tensor([1.0, 10.0, 0.1, 3.0]))
    one, two = EBFT(use_whitening=True), EBFT(use_whitening=True)
    rewards, _ = one.feature_rewards(features, target, SIZE)
    scaled, _ = two.feature_rewards(features @ scale, target @ scale, SIZE)
    torch.testing.assert_close(rewards, scaled, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_baseline_of_crowding_does_not_know_the_sample(size):
    """Against the mean over pairs that do not hold the sample, and against a change of the sample."""
    features = drawn(size, WIDTH)

    def baseline(features):
        products = features @ features.T
        crowding = (products.sum(1) - products.diagonal()) / (size - 1)
        return crowding - leave_one_out_crowding(crowding, torch.zeros(size, dtype=torch.long))

    pairs = [features[i] @ features[k] for i in range(1, size) for k in range(1, size) if i != k]
    right = torch.stack(pairs).mean() if pairs else torch.zeros(())
    torch.testing.assert_close(baseline(features)[0], right)
    changed = features.clone()
    changed[0] = drawn(WIDTH)
    torch.testing.assert_close(baseline(changed)[0], right)


def test_advantages():
    rewards_SR = torch.tensor([[1.0, -0.2], [2.0, -0.6], [4.0, -0.1], [0.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
    group_S = torch.tensor([0, 0, 0, 1, 1, 1])
    total = rewards_SR.sum(1)
    crowd = [-0.2 - (-0.9 + 0.4), -0.6 - (-0.9 + 1.2), -0.1 - (-0.9 + 0.2), 0, 0, 0]
    right = torch.tensor([1 - 3.0, 2 - 2.5, 4 - 1.5, 0 - 2.0, 1 - 1.5, 3 - 0.5]) + torch.tensor(crowd)
    torch.testing.assert_close(EBFT().advantages(rewards_SR, group_S), right)
    torch.testing.assert_close(EBFT(baseline="rloo").advantages(rewards_SR, group_S), right)
    groups = total.view(2, 3)
    right = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    torch.testing.assert_close(EBFT(baseline="grpo").advantages(rewards_SR, group_S), right)
    torch.testing.assert_close(EBFT(baseline="reinforce").advantages(rewards_SR, group_S), total)
    alone = EBFT().advantages(rewards_SR[:2], torch.tensor([0, 1]))
    torch.testing.assert_close(alone, total[:2])
