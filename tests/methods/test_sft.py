from math import exp

import pytest

from made_batches import made_batch, made_outputs, metrics_of, tensor, total_loss
from upweight.methods import SFT

LOGPS = [[-1.0, -0.5], [-2.0]]


def test_nll_is_the_mean_over_tokens():
    assert total_loss(SFT(), made_outputs(LOGPS), made_batch([2, 1])) == pytest.approx(3.5 / 3)


def test_chunked_nll_is_another_word_for_nll():
    assert SFT(loss_type="chunked_nll") == SFT()


def test_dft_weights_each_token_by_its_probability():
    expected = (1.0 * exp(-1.0) + 0.5 * exp(-0.5) + 2.0 * exp(-2.0)) / 3
    assert total_loss(SFT(loss_type="dft"), made_outputs(LOGPS), made_batch([2, 1])) == pytest.approx(expected)


def test_metrics_are_means_over_tokens():
    out = made_outputs(LOGPS, entropy_T=tensor([1.0, 2.0, 6.0]), is_top_T=tensor([1.0, 0.0, 0.0]))
    assert metrics_of(SFT(), out, made_batch([2, 1])) == pytest.approx({"entropy": 3.0, "mean_token_accuracy": 1 / 3})
