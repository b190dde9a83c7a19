"""Rewards of parts of a completion: what functions may return, and which tokens it reaches."""

import numpy as np
import pytest
import torch

from made_rewards import file_scorer
from made_tokenizers import byte_tokenizer
from upweight.errors import UserError
from upweight.rewards.load import as_rewards
from upweight.rewards.parts import PartRewards, fitted
from upweight.rewards.reward import RewardCall
from upweight.rewards.scorer import Scorer


def call(*ids, texts=None, decode=None):
    texts = texts or ["?"] * len(ids)
    return RewardCall(["q"] * len(ids), texts, [list(one) for one in ids], {}, [0] * len(ids), decode=decode)


def scored(returned, *ids, **options):
    with Scorer(as_rewards(lambda completions: returned)) as scorer:
        return scorer.score(call(*ids, **options))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_value_for_each_token_is_the_reward_up_to_that_token(kind):
    result = scored([kind([0.5, 0.0, -2.0]), kind([1.0, 2.0])], [7, 8, 9], [7, 8])
    assert result.rewards_SR.tolist() == [[-1.5], [3.0]]
    assert result.credits == {(0, 0): [(1, 0.5), (2, 0.0), (3, -2.0)], (1, 0): [(1, 1.0), (2, 2.0)]}


def test_pairs_numbers_and_nothing_can_stand_beside_each_other():
    result = scored([[(2, 0.5), (3, 1)], 4.0, None, []], [7, 8, 9], [7], [7], [7])
    assert result.rewards_SR[:2].tolist() == [[1.5], [4.0]]
    assert result.rewards_SR[2].isnan().all()
    assert result.rewards_SR[3].tolist() == [0.0]  # no step: nothing earned
    assert result.credits == {(0, 0): [(2, 0.5), (3, 1.0)], (3, 0): []}


def test_a_worker_process_returns_parts(tmp_path):
    code = "def steps(completions):\n    return [[(1, 0.25), (2, 0.5)], [3.0]]\n"
    with file_scorer(tmp_path, code, "steps") as scorer:
        assert scorer.score(call([5, 6], [5])).credits == {(0, 0): [(1, 0.25), (2, 0.5)], (1, 0): [(1, 3.0)]}


def test_a_value_that_is_not_finite_fails_its_completion_alone():
    result = scored([[0.5, float("nan")], [(1, float("inf"))], [1.0]], [7, 8], [7], [7])
    assert result.rewards_SR.isnan().tolist() == [[True], [True], [False]]
    assert result.credits == {(2, 0): [(1, 1.0)]}
    assert result.metrics["rewards/<lambda>/failed"] == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0.5, 0.5], "completion 0 has 3 tokens, but got 2 values. Give one for each entry of completion_ids"),
        ([(0, 0.5)], "completion 0 has 3 tokens, but got the end 0. An end is the number of tokens up to"),
        ([(4, 0.5)], "but got the end 4"),
        ([(1.5, 0.5)], "value 0 is a list"),
        ([(1, 0.5, 2)], "value 0 is a list"),
        ([0.5, "no", 1.0], "For parts of a completion give one value for each token, (end, value) pairs"),
        ([0.5, None, 1.0], "value 0 is a list"),
        ({"steps": [(1, 0.5)]}, "value 0 is a dict"),
        ({"characters": [(2, 0.5)]}, "completion 0 has 1 characters, but got the end 2"),
        ({"characters": [(1, 0.5)]}, "cannot be placed: its text is not that of its tokens"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_words(returned, message):
    with pytest.raises(UserError) as error:
        scored([returned], [7, 8, 9], decode=lambda ids: "other text")
    assert "reward '<lambda>'" in str(error.value)
    assert message in str(error.value)


def test_characters_end_at_the_token_that_completes_them():
    tokenizer = byte_tokenizer("chatml")
    text = "né\nb"  # the second letter is two tokens
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=True)

    assert len(ids) == 6
    ends = {"characters": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]}
    result = scored([ends], ids, texts=[text], decode=decode)
    assert result.credits[0, 0] == [(1, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)]
    message = [{"role": "assistant", "content": text}]
    assert scored([ends], ids, texts=[message], decode=decode).credits == result.credits
    with pytest.raises(UserError, match="several turns"):
        scored([{"characters": [(1, 1.0)]}], ids, texts=["other text"], decode=decode)


def test_written_rows_have_no_tokens_and_keep_their_sums():
    result = scored([{"characters": [(1, 1.0), (2, 0.5)]}], [], texts=["ab"])
    assert result.rewards_SR.tolist() == [[1.5]]


def test_a_token_of_several_letters_ends_all_of_them():
    def decode(tokens):
        return "".join({1: "ab.", 2: "\ncd", 3: ""}[token] for token in tokens)

    parts = PartRewards([(3, 1.0), (4, 2.0), (6, 3.0)], in_text=True)
    assert fitted(parts, [1, 2, 3], "ab.\ncd", decode, "here") == [(1, 1.0), (2, 2.0), (2, 3.0)]
