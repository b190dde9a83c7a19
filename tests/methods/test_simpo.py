from math import exp, log

import pytest

from made_batches import made_batch, made_outputs, sigma, total_loss
from upweight.methods import SimPO


@pytest.mark.parametrize(("smoothing", "nll_weight"), [(0.0, 0.0), (0.1, 1.0)])
def test_simpo_asks_for_a_margin_of_means(smoothing, nll_weight):
    out = made_outputs([[-1.0, -0.4], [-2.0]])
    batch = made_batch([2, 1], pair_P2=[[0, 1]])
    x = 2.0 * (-0.7 + 2.0) - 0.5
    expected = -(1 - smoothing) * log(sigma(x)) - smoothing * log(sigma(-x)) + nll_weight * 0.7
    method = SimPO(beta=2.0, gamma=0.5, label_smoothing=smoothing, nll_weight=nll_weight)
    assert total_loss(method, out, batch) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("sigmoid", -log(sigma(2.0 * (-1.4 + 2.0)))),
        ("hinge", 0.0),
        ("ipo", (-0.7 + 2.0 - 1 / 4.0) ** 2),
    ],
)
def test_cpo_losses_compare_sums_and_ipo_means(loss_type, expected):
    out = made_outputs([[-1.0, -0.4], [-2.0]])
    batch = made_batch([2, 1], pair_P2=[[0, 1]])
    method = SimPO(loss_type=loss_type, beta=2.0, nll_weight=0.0)
    assert total_loss(method, out, batch) == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [0.25, -0.5])
def test_alphapo_changes_the_shape_of_the_reward(alpha):
    out, batch = made_outputs([[-1.0, -0.4], [-2.0]]), made_batch([2, 1], pair_P2=[[0, 1]])
    chosen, rejected = ((1 - exp(mean) ** -alpha) / alpha for mean in (-0.7, -2.0))
    expected = -log(sigma(2.0 * (chosen - rejected) - 0.5))
    assert total_loss(SimPO(beta=2.0, gamma=0.5, nll_weight=0.0, alpha=alpha), out, batch) == pytest.approx(expected)
