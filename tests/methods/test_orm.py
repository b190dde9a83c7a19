from math import log

import pytest

from made_batches import made_batch, metrics_of, sigma, tensor, total_loss
from upweight.methods import ORM
from upweight.types import Outputs


def test_orm_ranks_the_chosen_above_the_rejected():
    out = Outputs(scores_TC=tensor([[1.0], [0.2], [-0.5], [0.5]]))
    batch = made_batch([1, 1, 1, 1], pair_P2=[[0, 1], [2, 3]])
    expected = (-log(sigma(0.8)) - log(sigma(-1.0))) / 2
    assert total_loss(ORM(), out, batch) == pytest.approx(expected)
    centred = expected + 0.1 * 1.2**2 / 2
    assert total_loss(ORM(center_rewards_coefficient=0.1), out, batch) == pytest.approx(centred)
    metrics = metrics_of(ORM(), out, batch)
    scores = {"min_reward": -0.5, "mean_reward": 0.3, "max_reward": 1.0}
    assert metrics == pytest.approx({"accuracy": 0.5, "margin": -0.1, **scores})


def test_orm_subtracts_the_margin_of_the_data():
    out = Outputs(scores_TC=tensor([[1.0], [0.2]]))
    batch = made_batch([1, 1], pair_P2=[[0, 1]], margin_P=[0.3])
    assert total_loss(ORM(), out, batch) == pytest.approx(-log(sigma(0.5)))
