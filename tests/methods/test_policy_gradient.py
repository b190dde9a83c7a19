from math import exp, log, nan

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from made_batches import flat, made_batch, made_outputs, metrics_of, sigma, tensor, total_loss
from upweight.methods import GDPO, GRPO, RLOO
from upweight.methods.formulas.policy_losses import quantile
from upweight.types import Sample

# Two completions: advantage 2 with two tokens of ratio 1.5 and 0.9, advantage -1 with one token of ratio 0.5.
LOGPS = [[-1.0, -0.5], [-2.0]]
OLD = [[-1.0 - log(1.5), -0.5 - log(0.9)], [-2.0 - log(0.5)]]
REF = [[-1.2, -0.5], [-1.7]]


def batch(**known):
    fields = {"advantage_S": [2.0, -1.0], "old_logps_T": flat(OLD)}
    return made_batch([2, 1], **(fields | known))


def loss(known=None, ref=None, out=None, **settings):
    return total_loss(GRPO(**settings), out or made_outputs(LOGPS, ref), batch(**(known or {})))


def sapo(ratio, advantage, tau):
    return -4 / tau * sigma(tau * (ratio - 1)) * advantage


CLIPPED_SUM = -1.2 * 2 - 0.9 * 2 + 0.8  # 1.5 counts as 1.2; for a negative advantage 0.5 counts as 0.8
PHI_UP = exp(3 + 2 * log(1.35) - 3 * 1.35)
PHI_DOWN = exp(2 + 3 * log(0.5) - 2 * 0.5)
BY_HAND = {
    "grpo": (-(2.4 + 1.8) / 2 + 0.8) / 2,
    "bnpo": CLIPPED_SUM / 3,
    "dapo": CLIPPED_SUM / 3,
    "dr_grpo": CLIPPED_SUM / (2 * 10),
    "luspo": CLIPPED_SUM / 2,
    "cispo": (1.2 * 2 * 1.0 + 0.9 * 2 * 0.5 - 0.5 * 2.0) / 3,
    "sapo": ((sapo(1.5, 2, 1.0) + sapo(0.9, 2, 1.0)) / 2 + sapo(0.5, -1, 1.05)) / 2,
    "vespo": (PHI_UP * 2 * (1.0 + 0.5) - PHI_DOWN * 2.0) / 3,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_of_two_completions(name):
    assert loss(loss_type=name, max_completion_length=10) == pytest.approx(BY_HAND[name])


@pytest.mark.parametrize("name", ["grpo", "sapo", "dr_grpo", "luspo", "bnpo", "dapo", "cispo"])
def test_a_completion_in_two_stretches_counts_once(name):
    method = GRPO(loss_type=name, max_completion_length=10)
    known = {"advantage_S": [2.0, 2.0, -1.0], "old_logps_T": flat(OLD), "share_S": [0.5, 0.5, 1.0]}
    split = total_loss(method, made_outputs([[-1.0], [-0.5], [-2.0]]), made_batch([1, 1, 1], **known))
    assert split == pytest.approx(BY_HAND[name])


def test_a_higher_upper_bound_lets_the_ratio_through():
    assert loss(loss_type="bnpo", epsilon_high=1.0) == pytest.approx((-3.0 - 1.8 + 0.8) / 3)


def test_cispo_caps_the_ratio_above_one():
    expected = (1.4 * 2 * 1.0 + 0.9 * 2 * 0.5 - 0.5 * 2.0) / 3
    assert loss(loss_type="cispo", epsilon_high=0.4) == pytest.approx(expected)


def test_delta_bounds_the_ratio_of_negative_advantages():
    old = flat([[-1.0, -0.5], [-2.0 - log(5.0)]])
    assert loss({"old_logps_T": old}, loss_type="bnpo") == pytest.approx((-4.0 + 5.0) / 3)
    assert loss({"old_logps_T": old}, loss_type="bnpo", delta=3.0) == pytest.approx((-4.0 + 3.0) / 3)


def test_sequence_level_uses_the_mean_log_ratio():
    ratio = (1.5 * 0.9) ** 0.5
    expected = (-min(ratio, 1.2) * 2 + 0.8) / 2
    assert loss(loss_type="grpo", importance_sampling_level="sequence") == pytest.approx(expected)


def test_without_old_log_probs_the_ratio_is_one():
    assert loss({"old_logps_T": None}, loss_type="bnpo") == pytest.approx(-(2 + 2 - 1) / 3)


@pytest.mark.parametrize("corrected", [True, False])
def test_kl_to_the_reference(corrected):
    gaps = [-0.2, 0.0, 0.3]
    kl = [exp(gap) - gap - 1 for gap in gaps]
    weighed = [k * r for k, r in zip(kl, [1.5, 0.9, 0.5], strict=True)] if corrected else kl
    expected = (CLIPPED_SUM + 0.1 * sum(weighed)) / 3
    settings = {"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": corrected}
    assert loss(ref=REF, **settings) == pytest.approx(expected)
    metrics = metrics_of(GRPO(**settings), made_outputs(LOGPS, REF), batch())
    assert metrics["kl"] == pytest.approx(sum(kl) / 3)


def test_a_truncated_completion_counts_as_a_sequence_without_tokens():
    method = GRPO(loss_type="grpo")
    whole = made_batch([2, 1, 0], advantage_S=[2.0, -1.0, 3.0], old_logps_T=flat(OLD))
    assert method.count(whole)["sequences"] == 3
    assert total_loss(method, made_outputs(LOGPS), whole) == pytest.approx(BY_HAND["grpo"] * 2 / 3)
    tokens = GRPO(loss_type="dapo")
    assert tokens.count(whole)["rollout_tokens"] == 3


# Trainer over sampler: 4, 0.5 and 1 (a log-prob the sampler did not report).
SAMPLER = [[OLD[0][0] - log(4.0), OLD[0][1] - log(0.5)], [nan]]
CORRECTIONS = {
    ("token_truncate", None): ([3.0, 0.5], 1.0),
    ("token_truncate", 0.8): ([3.0, 0.8], 1.0),
    ("token_mask", None): ([0.0, 0.5], 1.0),
    ("token_mask", 0.8): ([0.0, 0.0], 1.0),
    ("sequence_truncate", None): ([2.0, 2.0], 1.0),
    ("sequence_mask", None): ([2.0, 2.0], 1.0),
    ("sequence_mask", 2.5): ([0.0, 0.0], 0.0),
}


@pytest.mark.parametrize(("mode", "floor"), CORRECTIONS)
def test_tokens_are_weighed_by_trainer_over_sampler(mode, floor):
    (first, second), third = CORRECTIONS[mode, floor]
    expected = (first * -2.4 + second * -1.8 + third * 0.8) / 3
    settings = {"sampler_correction_mode": mode, "sampler_correction_floor": floor, "loss_type": "bnpo"}
    assert loss({"sampler_logps_T": flat(SAMPLER)}, **settings) == pytest.approx(expected)


@pytest.mark.parametrize("method", [GRPO(), GRPO(sampler_correction=False), RLOO(beta=0.0)])
def test_the_gap_to_the_sampler_is_logged_and_changes_no_loss(method):
    drawn = batch(drawn_logps_T=flat(SAMPLER))
    assert total_loss(method, made_outputs(LOGPS), drawn) == total_loss(method, made_outputs(LOGPS), batch())
    gap = metrics_of(method, made_outputs(LOGPS), drawn)["sampling/logp_gap"]
    assert gap == pytest.approx((log(4.0) + log(2.0)) / 3)  # an unknown log-prob counts as 0


def test_the_unset_correction_follows_the_level_of_the_ratio():
    assert GRPO().correction_mode == "token_truncate"
    assert GRPO(importance_sampling_level="sequence").correction_mode == "sequence_truncate"
    assert GRPO(importance_sampling_level="sequence", loss_type="vespo").correction_mode == "token_truncate"


def test_the_correction_can_be_turned_off():
    known = {"sampler_logps_T": flat(SAMPLER)}
    assert loss(known, sampler_correction=False, loss_type="bnpo") == pytest.approx(BY_HAND["bnpo"])
    assert loss(known, sampler_correction=True, loss_type="bnpo") == loss(known, loss_type="bnpo")


def test_a_mask_drops_corrections_too_large_to_represent():
    far = flat([[-1e4, -1e4], [nan]])
    got = loss({"sampler_logps_T": far}, sampler_correction_mode="sequence_mask", loss_type="bnpo")
    assert got == pytest.approx(0.8 / 3)


def test_the_kl_is_not_weighed_by_the_correction():
    known, settings = {"sampler_logps_T": flat(SAMPLER)}, {"loss_type": "bnpo", "sampler_correction_mode": "token_mask"}
    with_kl = loss(known, ref=REF, beta=0.1, **settings) - loss(known, **settings)
    without = loss(ref=REF, beta=0.1, loss_type="bnpo") - loss(loss_type="bnpo")
    assert with_kl == pytest.approx(without)


def test_vespo_folds_the_correction_into_its_weight():
    phi = exp(3 + 2 * log(1.35 * 3.0 * 0.5) - 3 * 1.35 * 3.0 * 0.5)
    expected = (phi * 2 * 1.5 - PHI_DOWN * 2.0) / 3
    assert loss({"sampler_logps_T": flat(SAMPLER)}, loss_type="vespo") == pytest.approx(expected)


@pytest.mark.parametrize(("threshold", "kept"), [(0.8, True), (0.6, False)])
def test_stale_sequences_of_negative_advantage_are_dropped(threshold, kept):
    # The sampler (here the old policy) gave the second completion log 2 = 0.693 more than the policy does.
    expected = (-4.2 + 0.8 * kept) / 3
    assert loss(off_policy_mask_threshold=threshold, loss_type="bnpo") == pytest.approx(expected)


def test_only_the_most_uncertain_tokens_are_trained_on():
    out = made_outputs(LOGPS, entropy_T=tensor([0.1, 0.5, 0.9]))
    assert loss(out=out, top_entropy_quantile=0.5, loss_type="bnpo") == pytest.approx((-1.8 + 0.8) / 3)


def test_a_step_in_which_nothing_is_scored_has_no_uncertain_tokens():
    assert float(GRPO(top_entropy_quantile=0.5).prepare({})["entropy_threshold"]) == 0


def test_entropy_bonus_is_a_mean_over_the_tokens_trained_on():
    out = made_outputs(LOGPS, entropy_T=tensor([0.1, 0.5, 0.9]))
    assert loss(out=out, entropy_coef=0.2, loss_type="grpo") == pytest.approx(BY_HAND["grpo"] - 0.2 * 0.5)
    both = loss(out=out, entropy_coef=0.2, top_entropy_quantile=0.5, loss_type="bnpo")
    assert both == pytest.approx((-1.8 + 0.8) / 3 - 0.2 * 0.7)


def test_clip_metrics_count_the_tokens_without_gradient():
    metrics = metrics_of(GRPO(), made_outputs(LOGPS), batch())
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    assert [metrics[name] for name in names] == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert (metrics["clip_ratio/low_min"], metrics["clip_ratio/high_max"]) == (0.0, 0.5)  # of the two sequences
    cispo = metrics_of(GRPO(loss_type="cispo"), made_outputs(LOGPS), batch())
    assert cispo["cispo_clip_ratio"] == pytest.approx(1 / 3)


def test_the_on_policy_gradient_is_minus_the_advantage():
    out = made_outputs(LOGPS)
    logps_T = out.logps_T.requires_grad_()
    for name in ("bnpo", "cispo", "luspo"):
        sums = GRPO(loss_type=name).loss(out, batch(old_logps_T=None), {}).sums
        (gradient,) = torch.autograd.grad(sum(sums.values()), logps_T)
        assert gradient.tolist() == pytest.approx([-2.0, -2.0, 1.0])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
def test_quantile_is_the_linear_one(share):
    values = tensor([3.0, -1.0, 4.0, 1.5, 9.0])
    assert float(quantile(values, share)) == pytest.approx(float(torch.quantile(values, share)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, "1 completion has no others to compare with"),
        ({"sync_ref_model": True}, "set trl.beta above 0"),
        ({"loss_type": "vespo", "sampler_correction_mode": "sequence_mask"}, "token_truncate or token_mask"),
        ({"sampler_correction_floor": 4.0}, "must not be above trl.vllm_importance_sampling_cap"),
        ({"top_entropy_quantile": 0.0}, "greater than 0"),
        ({"loss_type": "ppo"}, "'grpo', 'bnpo'"),
        ({"epsilon": True}, "a switch where a value is wanted"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        GRPO(**settings)


def test_rloo_and_decoupled_rewards_exclude_each_other():
    rloo = {"advantage_estimator": "rloo"}
    with pytest.raises(ValidationError, match="sum_then_normalize"):
        GRPO(**rloo, aggregation="normalize_then_sum")
    with pytest.raises(ValidationError, match="use rl: grpo"):
        GDPO(**rloo)
    with pytest.raises(ValidationError, match="normalize_then_sum"):
        GDPO(aggregation="sum_then_normalize")


@pytest.mark.parametrize("scale", ["batch", "none", False])
def test_a_scale_that_decoupled_rewards_would_ignore_is_refused(scale):
    refused = f"trl.scale_rewards: {scale or 'none'} has no effect"
    with pytest.raises(ValidationError, match=refused):
        GDPO(scale_rewards=scale)
    with pytest.raises(ValidationError, match=refused):
        GRPO(scale_rewards=scale, aggregation="normalize_then_sum")
    assert GDPO(scale_rewards=True)


def test_what_the_loss_needs_follows_from_its_settings():
    assert not GRPO().needs_reference
    assert GRPO(beta=0.1).needs_reference
    assert not GRPO().needs_preparation
    assert GRPO(top_entropy_quantile=0.5).needs_preparation


@pytest.mark.parametrize(
    ("settings", "pulled"),
    [({}, False), ({"beta": 0.1}, True), ({"entropy_coef": 0.1}, True), ({"top_entropy_quantile": 0.5}, True)],
)
def test_a_completion_without_advantage_counts_where_something_else_is_computed_from_it(settings, pulled):
    scored = np.array([False, True])
    idle, useful = (Sample(np.arange(2), scored, advantage=advantage) for advantage in (0.0, 1.0))
    method = GRPO(**settings)
    assert method.contributes(idle) == pulled
    assert method.contributes(useful)
    assert not method.contributes(Sample(np.arange(2), np.zeros(2, np.bool_), advantage=1.0))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", BY_HAND)
def test_equal_advantages_of_tokens_are_those_of_their_sequence(name, level):
    losses, gradients = [], []
    for known in ({}, {"advantage_T": [2.0, 2.0, -1.0]}):
        method = GRPO(loss_type=name, max_completion_length=10, importance_sampling_level=level)
        out = made_outputs(LOGPS)
        out.logps_T.requires_grad_()
        value = method.loss(out, batch(**known), {}).sums.popitem()[1]
        losses.append(value.detach())
        gradients.append(torch.autograd.grad(value, out.logps_T)[0])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_advantage_of_a_token_moves_that_token_alone(level):
    out = made_outputs(LOGPS)
    out.logps_T.requires_grad_()
    method = GRPO(importance_sampling_level=level, epsilon=0.9, loss_type="dapo")
    value = method.loss(out, batch(advantage_T=[0.0, 3.0, 0.0]), {}).sums["rollout_tokens"]
    ratio = 0.9 if level == "token" else (1.5 * 0.9) ** 0.5
    assert torch.autograd.grad(value, out.logps_T)[0].tolist() == pytest.approx([0.0, -3.0 * ratio, 0.0])


def test_old_completions_are_dropped_by_the_tokens_advantages():
    known = {"advantage_T": [-1.0, 1.0, -1.0]}
    masked = {"off_policy_mask_threshold": -10.0, "loss_type": "bnpo", "epsilon": 0.9}
    assert loss(known, **masked) == pytest.approx(-0.9 / 3)


def test_a_sample_whose_tokens_differ_contributes_without_an_advantage_of_its_sum():
    ids, mask = np.arange(3), np.array([False, True, True])
    assert GRPO().contributes(Sample(ids, mask, advantage=0.0, token_advantages=np.array([0.5, -0.5], np.float32)))
    assert not GRPO().contributes(Sample(ids, mask, advantage=1.0, token_advantages=np.zeros(2, np.float32)))
