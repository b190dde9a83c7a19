"""Draws follow the distribution, log-probs are those of the whole distribution, truncation is transformers'."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from upweight.sampler.draw import draw, penalised, truncated
from upweight.types import Sampling

ROWS, VOCABULARY = 6, 300


def logits(seed: int = 0, rows: int = ROWS, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def sampling(**changes) -> Sampling:
    return Sampling(max_new_tokens=1, **changes)


@pytest.mark.parametrize("vocabulary", [5, 128, 300])
def test_frequencies_are_the_probabilities(vocabulary: int):
    row = logits(1, 1, vocabulary)
    count = 40000
    even_B = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    token_B, logp_B = draw(row.expand(count, -1), even_B, sampling(temperature=1.3))
    p_V = (row[0] / 1.3).softmax(-1)
    torch.testing.assert_close(torch.bincount(token_B, minlength=vocabulary) / count, p_V, atol=2 / count, rtol=0)
    torch.testing.assert_close(logp_B, p_V.log()[token_B], atol=1e-5, rtol=0)


def test_the_ends_of_the_interval_give_possible_tokens():
    row = torch.full((2, 300), -torch.inf)
    row[:, [7, 200]] = 0.0
    token_B, _ = draw(row, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), sampling())
    assert token_B.tolist() == [7, 200]


@pytest.mark.parametrize(
    ("changes", "warpers"),
    [
        ({"top_k": 9}, [TopKLogitsWarper(9)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"top_p": 1e-9}, [TopPLogitsWarper(1e-9)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        ({"top_k": 9, "top_p": 0.8, "min_p": 0.1}, [TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.1)]),
        ({"top_k": 1000}, [TopKLogitsWarper(1000)]),
    ],
)  # fmt: skip
def test_truncation_is_that_of_transformers(changes: dict, warpers: list):
    expected = logits()
    for warper in warpers:
        expected = warper(None, expected)
    torch.testing.assert_close(truncated(logits(), sampling(**changes)), expected)


def test_repetition_penalty_is_that_of_transformers():
    ids_BN = torch.randint(VOCABULARY, (ROWS, 40), generator=torch.Generator().manual_seed(2))
    seen_BV = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter_(1, ids_BN, True)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids_BN, logits())
    torch.testing.assert_close(penalised(logits(), seen_BV, 1.7), expected)


def test_log_probs_know_nothing_of_penalty_and_truncation():
    seen_BV = torch.ones(ROWS, VOCABULARY, dtype=torch.bool)
    settings = sampling(temperature=0.7, top_k=4, top_p=0.9, min_p=0.01, repetition_penalty=1.5)
    uniform_B = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    token_B, logp_B = draw(logits(), uniform_B, settings, seen_BV)
    allowed = truncated(TemperatureLogitsWarper(0.7)(None, penalised(logits(), seen_BV, 1.5)), settings)  # pyright: ignore
    assert allowed.gather(1, token_B[:, None]).isfinite().all()
    expected = (logits() / 0.7).log_softmax(-1).gather(1, token_B[:, None])[:, 0]
    torch.testing.assert_close(logp_B, expected, atol=1e-5, rtol=0)


def test_temperature_zero_takes_the_most_likely():
    token_B, logp_B = draw(logits(), torch.zeros(ROWS, dtype=torch.float64), sampling(temperature=0.0, top_p=0.5))
    assert torch.equal(token_B, logits().argmax(-1))
    torch.testing.assert_close(logp_B, logits().log_softmax(-1).amax(-1), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("vocabulary", [300, 9000])
def test_kernels_draw_the_same_tokens_and_go_on_with_them(vocabulary: int, temperature: float):
    from upweight.sampler.kernels.draw import DrawState, draw_step

    rows = 12
    logits_BV = logits(2, rows, vocabulary).cuda()
    logits_BV[3, 100:] = logits_BV[4, :-5] = -torch.inf
    uniform_BN = torch.rand(rows, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    uniform_BN[0], uniform_BN[1] = 0, 1 - 1e-16
    zeros_B = torch.zeros(rows, dtype=torch.long, device="cuda")
    limit_B = torch.tensor([4] * (rows - 1) + [0], device="cuda")
    ids_KB, logps_KB = torch.zeros(3, rows, dtype=torch.long, device="cuda"), torch.zeros(3, rows, device="cuda")
    state = DrawState(uniform_BN, zeros_B.clone(), zeros_B + 7, zeros_B + 2, limit_B, zeros_B[:1] + 1, ids_KB, logps_KB)
    token_B, logp_B = draw(logits_BV, uniform_BN[:, 2], sampling(temperature=temperature))
    draw_step(logits_BV, temperature, state)
    assert torch.equal(ids_KB[1], token_B)
    assert not ids_KB[[0, 2]].any()
    torch.testing.assert_close(logps_KB[1], logp_B, atol=1e-5, rtol=1e-5)
    assert torch.equal(state.token_B, torch.where(limit_B > 0, token_B, 0))
    assert state.length_B.tolist() == [8] * (rows - 1) + [7]
    assert state.drawn_B.tolist() == [3] * (rows - 1) + [2]
    assert state.column_1.tolist() == [2]
