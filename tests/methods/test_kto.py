from dataclasses import replace

import pytest
import torch

from made_batches import made_batch, made_outputs, metrics_of, sigma, total_loss
from upweight.methods import KTO


def labelled(mismatched_gain):
    # Gains over the reference: 0.5 for the good completion, -0.25 for the bad one.
    ref = [[-1.2, -1.3], [-1.75], [-1.0 - mismatched_gain], [-1.0 - 3 * mismatched_gain]]
    out = made_outputs([[-1.0, -1.0], [-2.0], [-1.0], [-1.0]], ref)
    return out, made_batch([2, 1, 1, 1], label_S=[1, 0, -1, -1])


@pytest.mark.parametrize(("gain", "kl"), [(0.1, 0.2), (-0.1, 0.0)])
def test_gains_are_measured_from_the_kl_of_mismatched_pairs(gain, kl):
    method = KTO(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5)
    good, bad = 2.0 * (1 - sigma(0.5 * (0.5 - kl))), 0.5 * (1 - sigma(0.5 * (kl + 0.25)))
    assert total_loss(method, *labelled(gain)) == pytest.approx((good + bad) / 2)
    metrics = metrics_of(method, *labelled(gain))
    assert metrics["kl"] == pytest.approx(kl, abs=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(0.25)
    assert metrics["rewards/rejected"] == pytest.approx(-0.125)


def test_pairs_in_a_batch_are_compared():
    out, batch = labelled(0.0)
    assert "rewards/accuracies" not in metrics_of(KTO(), out, batch)
    metrics = metrics_of(KTO(beta=0.5), out, replace(batch, pair_P2=torch.tensor([[0, 1], [1, 0]])))
    assert metrics["rewards/accuracies"] == 0.5
    assert metrics["rewards/margins"] == 0.0


def test_a_weight_of_zero_is_honoured():
    only_good = KTO(beta=0.5, undesirable_weight=0.0)
    only_bad = KTO(beta=0.5, desirable_weight=0)
    assert total_loss(only_good, *labelled(0.0)) == pytest.approx((1 - sigma(0.25)) / 2)
    assert total_loss(only_bad, *labelled(0.0)) == pytest.approx((1 - sigma(0.125)) / 2)


def test_apo_zero_unpaired_needs_no_kl():
    method = KTO(beta=0.5, loss_type="apo_zero_unpaired")
    assert not method.needs_preparation
    expected = (1 - sigma(0.25) + sigma(-0.125)) / 2
    assert total_loss(method, *labelled(5.0)) == pytest.approx(expected)
    assert "kl" not in metrics_of(method, *labelled(5.0))
