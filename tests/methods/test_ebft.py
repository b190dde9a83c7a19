import pytest
import torch
from pydantic import ValidationError

from made_batches import made_batch, made_outputs, metrics_of, tensor, total_loss
from upweight.methods import EBFT, GRPO, PolicyGradient
from upweight.methods.ebft import ebft_reward, feature_crowding

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
    policy = PolicyGradient(loss_type=loss_type, beta=0.1)
    ref = [[-1.1, -0.4], [-2.5], [-2.0, -0.1]]
    samples = made_batch([2, 1], advantage_S=[2.0, -1.0])
    alone = total_loss(GRPO(policy=policy), made_outputs(LOGPS[:2], ref[:2]), samples)
    together = total_loss(EBFT(policy=policy, ce_coef=0.1, rl_coef=0.5), made_outputs(LOGPS, ref), batch())
    assert together == pytest.approx(0.5 * alone + 0.1 * 1.8)


def test_cross_entropy_is_left_out_when_it_weighs_nothing():
    assert "ce_tokens" not in EBFT(mode="strided").count(batch())


def test_reward_pulls_to_the_target_and_away_from_the_group():
    feature_SF = tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [2.0, 0.0]])
    target_SF = tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [1.0, 1.0]])
    reward_S = ebft_reward(feature_SF, target_SF, torch.tensor([0, 0, 0, 1]), 1.0, 0.5)
    crowding = [0.6 / 2, (0.6 + 0.8) / 2, 0.8 / 2, 0.0]
    expected = [2 * cosine - crowd for cosine, crowd in zip([1.0, 0.6, 0.0, 0.5**0.5], crowding, strict=True)]
    assert reward_S.tolist() == pytest.approx(expected)
    assert feature_crowding(feature_SF, torch.tensor([0, 0, 0, 1])).tolist() == pytest.approx(crowding)


def test_settings_out_of_bounds_are_refused():
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        EBFT(feature_layers=[0.5, 1.5])
    with pytest.raises(ValidationError, match="'rloo', 'group_norm' or 'reinforce'"):
        EBFT(advantage_estimator="gae")
