"""Penalties for saying the same."""

import pytest

from upweight.rewards.builtin.penalties import DiversityReward, RepetitionReward, ngrams


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
