import pytest

from made_batches import made_batch, made_outputs, metrics_of, total_loss
from upweight.methods import IPO


def test_ipo_regresses_the_mean_margin():
    out = made_outputs([[-1.0, -0.4], [-2.0]], [[-1.2, -0.8], [-1.8]])
    batch = made_batch([2, 1], pair_P2=[[0, 1]])
    assert total_loss(IPO(beta=0.5), out, batch) == pytest.approx((0.6 / 2 + 0.2 - 1) ** 2)
    assert metrics_of(IPO(beta=0.5), out, batch)["rewards/margins"] == pytest.approx(0.5 * 0.5)
