from math import exp

import pytest
import torch
from pydantic import ValidationError

from made_batches import made_batch, made_outputs, metrics_of, total_loss
from upweight.methods import RLOO
from upweight.types import Sample

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def advantages(rewards, drift=None, **settings):
    log_ratio_S = None if drift is None else torch.tensor(drift)
    return RLOO(**settings).advantages(torch.tensor(rewards)[:, None], GROUPS, log_ratio_S).tolist()


def test_a_reward_is_compared_with_the_others_of_its_group():
    assert advantages([1.0, 2.0, 6.0, 0.0, 0.0, 3.0]) == pytest.approx([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0])


def test_the_drift_from_the_reference_is_taken_off_the_reward():
    drift = [0.0, 10.0, -10.0, 0.0, 0.0, 0.0]
    expected = advantages([1.0, 2.0 - 1.0, 6.0 + 1.0, 0.0, 0.0, 3.0])
    assert advantages([1.0, 2.0, 6.0, 0.0, 0.0, 3.0], drift, beta=0.1) == pytest.approx(expected)


def test_rewards_are_clipped_before_the_drift_counts():
    clipped = advantages([1.0, 2.0, 2.0, 0.0, 0.0, 2.0], [0.0] * 5 + [-50.0], beta=0.1)
    found = advantages([1.0, 2.0, 6.0, -1.0, 0.0, 3.0], [0.0] * 5 + [-50.0], beta=0.1, reward_clip_range=(0.0, 2.0))
    assert found == pytest.approx(clipped)


def test_what_is_not_scored_or_alone_has_no_advantage():
    nan = float("nan")
    assert advantages([1.0, nan, 3.0, 5.0, nan, nan]) == pytest.approx([-2.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    normed = advantages([1.0, nan, 3.0, 5.0, nan, nan], normalize_advantages=True)
    deviation = 8**0.5 + 1e-4  # of -2 and 2 alone
    assert normed == pytest.approx([-2 / deviation, 0.0, 2 / deviation, 0.0, 0.0, 0.0])


def test_whole_completions_have_one_ratio_that_is_clipped():
    out = made_outputs([[-1.0, -1.0], [-2.0], [-1.0]], [[-1.5, -1.0], [-2.0], [-1.0]])
    old = torch.tensor([-1.1, -1.3, -1.0, -1.05], dtype=torch.float64)
    batch = made_batch([2, 1, 1], advantage_S=[1.0, -1.0, 2.0], old_logps_T=old)
    up, down = exp(0.4), exp(-1.0)
    expected = (-min(up, 1.3) + max(down, 0.8) - 2 * exp(0.05)) / 3
    method = RLOO(epsilon_high=0.3)
    assert up > 1.3
    assert total_loss(method, out, batch) == pytest.approx(expected)
    metrics = metrics_of(method, out, batch)
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert metrics["kl"] == pytest.approx((0.4 - 0.3 + 1.0 - 0.05) / 4)


def test_a_completion_without_scored_tokens_counts_but_adds_nothing():
    out = made_outputs([[-1.0]], [[-1.0]])
    batch = made_batch([1, 0], advantage_S=[1.0, 5.0])
    assert total_loss(RLOO(), out, batch) == pytest.approx(-0.5)


def test_only_completions_with_an_advantage_are_forwarded():
    ids, scored = torch.zeros(2).long().numpy(), torch.tensor([False, True]).numpy()
    assert RLOO().contributes(Sample(ids, scored, advantage=0.5))
    assert not RLOO().contributes(Sample(ids, scored, advantage=0.0))


def test_a_reference_is_needed_where_the_kl_counts():
    assert (RLOO().needs_reference, RLOO().needs_kl_in_reward) == (True, True)
    assert (RLOO(beta=0.0).needs_reference, RLOO(beta=0.0).needs_kl_in_reward) == (False, False)
    assert RLOO().group_size == 2
    with pytest.raises(ValidationError, match="sync_ref_model needs a reference"):
        RLOO(beta=0.0, sync_ref_model=True)
    with pytest.raises(ValidationError, match="reward_clip_range"):
        RLOO(reward_clip_range=(1.0, 0.0))
