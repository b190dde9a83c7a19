"""Rewards for length."""

import math

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin.lengths import CosineLengthReward, LengthReward


def test_length_in_words():
    reward = LengthReward(minimum=2, maximum=3)
    assert reward(["", "a", "a b", "a  b\nc", "a b c d", "w " * 10**6]) == [0, 0, 1, 1, 0, 0]


def test_length_falls_over_the_slack():
    reward = LengthReward(maximum=2, slack=3, wrong=-1.0)
    assert reward(["a " * words for words in (2, 3, 4, 6, 7)]) == pytest.approx([1, 0.5, 0, -1, -1])


def test_length_in_tokens_uses_the_ids():
    assert LengthReward(maximum=2, unit="tokens")(["long text here", "x"], completion_ids=[[1], [1, 2, 3]]) == [1, 0]
    with pytest.raises(UserError, match="completion_ids"):
        LengthReward(maximum=2, unit="tokens")(["x"])


def test_length_in_characters():
    assert LengthReward(maximum=2, unit="characters")(["日本", "日本語"]) == [1, 0]


def test_cosine_length_follows_its_formula():
    reward = CosineLengthReward(
        max_length=4, unit="words", right_short=2.0, right_long=1.0, wrong_short=-10, wrong_long=0
    )
    texts = ["7", "a a a 7", "a 7", "8", "a a a 8", "a a a a a a a 8"]
    wanted = [1 + 0.5 * (1 + math.cos(math.pi / 4)), 1.0, 1.5, -5 * (1 + math.cos(math.pi / 4)), 0.0, 0.0]
    assert reward(texts, answer=["7"] * 6) == pytest.approx(wanted)


def test_cosine_length_beyond_the_limit_and_without_answer():
    reward = CosineLengthReward(max_length=1, unit="words", too_long=-10.0, by="exact(column='gold')")
    assert reward(["a b", "a", "a"], gold=["a b", "a", None]) == [-10.0, 0.5, None]
