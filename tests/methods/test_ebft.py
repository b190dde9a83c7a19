from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from made_batches import made_batch, made_outputs, metrics_of, total_loss
from upweight.methods import EBFT, GRPO
from upweight.types import Sample

# Two samples and one demonstration.
LOGPS = [[-1.0, -0.5], [-2.0], [-3.0, -0.6]]


def batch():
    return made_batch([2, 1, 2], advantage_S=[2.0, -1.0, 0.0], label_S=[0, 0, 1])


def test_strided_mode_is_reinforce_plus_cross_entropy():
    method = EBFT(mode="strided", rl_coef=0.5, ce_coef=0.1)
    reinforce, cross_entropy = (2.0 * 1.5 - 1.0 * 2.0) / 3, 3.6 / 2
    assert total_loss(method, made_outputs(LOGPS), batch()) == pytest.approx(0.5 * reinforce + 0.1 * cross_entropy)
    metrics = metrics_of(method, made_outputs(LOGPS), batch())
    assert metrics["ebft/rl_loss"] == pytest.approx(reinforce)
    assert metrics["ebft/ce_loss"] == pytest.approx(cross_entropy)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "vespo"])
def test_structured_mode_is_the_policy_gradient_of_the_samples_alone(loss_type):
    policy = {"loss_type": loss_type, "beta": 0.1}
    ref = [[-1.1, -0.4], [-2.5], [-2.0, -0.1]]
    samples = made_batch([2, 1], advantage_S=[2.0, -1.0])
    alone = total_loss(GRPO(**policy), made_outputs(LOGPS[:2], ref[:2]), samples)
    together = total_loss(EBFT(**policy, ce_coef=0.1, rl_coef=0.5), made_outputs(LOGPS, ref), batch())
    assert together == pytest.approx(0.5 * alone + 0.1 * 1.8)


def test_cross_entropy_is_left_out_when_it_weighs_nothing():
    assert "ce_tokens" not in EBFT(mode="strided").count(batch())


def test_what_cannot_move_the_gradient_is_not_forwarded():
    scored = np.ones(2, np.bool_)
    sampled = Sample(np.array([3, 4]), scored, advantage=0.5, label=0)
    idle, shown = replace(sampled, advantage=0.0), replace(sampled, advantage=0.0, label=1)
    for mode in ("structured", "strided"):
        method = EBFT(mode=mode, ce_coef=0.1)
        assert [method.contributes(one) for one in (sampled, idle, shown)] == [True, False, True]
        assert not EBFT(mode=mode).contributes(shown)
        assert not EBFT(mode=mode, rl_coef=0.0).contributes(sampled)


def test_settings_out_of_bounds_are_refused():
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        EBFT(feature_layers=[0.5, 1.5])
    with pytest.raises(ValidationError, match="'rloo', 'group_norm' or 'reinforce'"):
        EBFT(baseline="gae")
    for key in ("temperature", "top_p"):
        with pytest.raises(ValidationError, match=f"ebft.{key}: at 0 all samples of a block are alike"):
            EBFT(mode="strided", **{key: 0})
