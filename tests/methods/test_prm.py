from math import log

import pytest
import torch

from made_batches import made_batch, metrics_of, sigma, tensor, total_loss
from upweight.methods import PRM
from upweight.types import Outputs


def test_prm_classifies_step_ends():
    out = Outputs(scores_TC=tensor([[0.0, 1.0], [0.5, 0.0], [0.0, -2.0]]))
    batch = made_batch([2, 1], target_T=[1, 1, 0])
    expected = -(log(sigma(1.0)) + log(sigma(-0.5)) + log(sigma(2.0))) / 3
    assert total_loss(PRM(), out, batch) == pytest.approx(expected)
    assert metrics_of(PRM(), out, batch)["accuracy"] == pytest.approx(2 / 3)


def test_prm_with_one_score_is_a_logistic_regression():
    batch = made_batch([2], target_T=[1, 0])
    one = Outputs(scores_TC=tensor([[0.7], [-0.3]]))
    two = Outputs(scores_TC=torch.stack([torch.zeros(2).double(), one.scores_TC[:, 0]], 1))
    assert total_loss(PRM(), one, batch) == pytest.approx(total_loss(PRM(), two, batch))
    assert total_loss(PRM(), one, batch) == pytest.approx(-(log(sigma(0.7)) + log(sigma(0.3))) / 2)
