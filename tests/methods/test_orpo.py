from math import exp, log

import pytest
import torch

from made_batches import made_batch, made_outputs, metrics_of, sigma, total_loss
from upweight.methods import ORPO
from upweight.methods.orpo import log_one_minus_exp


def test_orpo_adds_odds_of_the_answers_to_the_likelihood_of_the_whole():
    out = made_outputs([[-3.0, -0.5, -0.7], [-2.0, -1.0]])
    batch = made_batch([3, 2], pair_P2=[[0, 1]], prompt_T=[True, False, False, False, False])
    odds = (-0.6 - log(1 - exp(-0.6))) - (-1.5 - log(1 - exp(-1.5)))
    expected = (3.0 + 0.5 + 0.7) / 3 - 0.2 * log(sigma(odds))
    assert total_loss(ORPO(alpha=0.2), out, batch) == pytest.approx(expected)
    metrics = metrics_of(ORPO(alpha=0.2), out, batch)
    assert metrics["nll_loss"] == pytest.approx(1.4)
    assert metrics["log_odds_chosen"] == pytest.approx(odds)
    assert metrics["log_odds_ratio"] == pytest.approx(log(sigma(odds)))


def test_orpo_stays_finite_when_the_policy_is_certain():
    assert torch.isfinite(log_one_minus_exp(torch.tensor([0.0, -1e-9, -50.0]))).all()
