"""Rewards for length, repetition and likeness."""

import math

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin.measures import (
    CosineLengthReward,
    DiversityReward,
    LengthReward,
    RepetitionReward,
    ngrams,
)


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


def test_ngrams():
    assert ngrams(["a", "b", "c"], 2) == [("a", "b"), ("b", "c")]
    assert ngrams(["a"], 2) == []


def test_repetition():
    reward = RepetitionReward(ngram=1)
    assert reward(["a b c d", "a a a a", "A a b B", "", "a"]) == pytest.approx([0, -0.75, -0.5, 0, 0])


def test_repetition_of_tokens_and_characters():
    assert RepetitionReward(ngram=2, unit="tokens", penalty=-2)(["x"], completion_ids=[[1, 2, 1, 2, 1]]) == [-1.0]
    assert RepetitionReward(ngram=1, unit="characters")(["日日"]) == [-0.5]


def test_an_enormous_repetition_nears_the_penalty():
    (score,) = RepetitionReward()(["again " * 200_000])
    assert score == pytest.approx(-1.0, abs=1e-4)


def test_diversity_compares_within_a_prompt_only():
    texts = ["a b c", "a b c", "x y z", "a b c", "p q r"]
    scores = DiversityReward()(texts, prompts=["one", "one", "one", "two", "two"])
    assert scores == pytest.approx([-0.5, -0.5, 0, 0, 0])


def test_diversity_takes_message_prompts_and_odd_completions():
    ask = [{"role": "user", "content": "q"}]
    assert DiversityReward()(["", "", "one"], prompts=[ask, ask, ask]) == pytest.approx([-0.5, -0.5, 0])
    assert DiversityReward()(["same", "same"], prompts=[ask, [*ask]]) == [-1, -1]
    assert DiversityReward()(["alone"], prompts=["x"]) == [0]
