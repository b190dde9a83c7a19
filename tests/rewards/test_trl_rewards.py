import pickle
from importlib.util import find_spec

import pytest

from upweight.errors import UserError
from upweight.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from upweight.rewards.load import as_rewards

RIGHT, WRONG = r"My answer is \boxed{\frac{1}{3}}", r"My answer is \boxed{\frac{1}{2}}"
GOLD = r"\frac{1}{3}"


def said(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>\nwhy\n</think>\nso", 1.0),
        ("<think></think>", 1.0),
        ("<think>why\nso", 0.0),
        ("so <think>why</think>", 0.0),
        ("<think>a<think>b</think></think>", 0.0),
        ("<think>a</think> b <think>", 0.0),
        ("why</think> so", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(text, score):
    assert think_format_reward(said(text)) == think_format_reward([text], anything=1) == [score]


def test_overlong_completions_are_punished_over_the_last_tokens():
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    assert punish([[1] * count for count in (10, 80, 85, 90, 100, 101, 500)]) == [0, 0, -0.25, -0.5, -1, -1, -1]
    assert get_soft_overlong_punishment(10, 0)([[1] * 10, [1] * 11]) == [0, -1]
    assert pickle.loads(pickle.dumps(punish))(completion_ids=[[1] * 90], prompts=["x"]) == [-0.5]
    assert as_rewards([punish])[0].name == "soft_overlong_punishment_reward"


def test_repetition_is_penalised_by_token_ids():
    penalise = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    assert penalise([[1, 2, 3, 4], [5, 5, 5, 5, 5], [1]]) == [0, -0.75, 0]
    with pytest.raises(UserError, match="max_penalty"):
        get_repetition_penalty_reward(max_penalty=0.5)


def test_algebra_without_its_package_says_how_to_get_it():
    if find_spec("math_verify") is not None:
        pytest.skip("it is installed")
    with pytest.raises(UserError, match="pip install math-verify"):
        accuracy_reward(said(RIGHT), [GOLD])


def test_accuracy_compares_by_algebra_and_leaves_out_what_has_no_solution():
    pytest.importorskip("math_verify")
    logged = {}
    texts, golds = said(RIGHT, WRONG, "no formula", RIGHT), [GOLD, GOLD, GOLD, "unreadable"]
    assert accuracy_reward(texts, golds, log_extra=logged.__setitem__, prompts=golds) == [1.0, 0.0, 0.0, None]
    assert logged["solution"] == golds
    assert logged["answer_parsed"][2:] == ["[unparseable]", "[skipped]"]
    assert logged["gold_parsed"][3] == "[unparseable]"


def test_accuracy_after_the_reasoning():
    pytest.importorskip("math_verify")
    texts = said(f"<think>x</think> {RIGHT}", f"<think>{RIGHT}</think> {WRONG}", f"<think>{RIGHT}", f"x|{RIGHT}")
    assert reasoning_accuracy_reward(texts, [GOLD] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert reasoning_accuracy_reward(texts[3:], [GOLD], reasoning_delimiters=["|"]) == [1.0]
    assert reasoning_accuracy_reward(texts[:1], ["unreadable"]) == [None]


def test_cosine_scaled_accuracy():
    pytest.importorskip("math_verify")
    scale = get_cosine_scaled_reward(max_len=100)
    ids = [[1] * 50, [1] * 50, [], [1] * 300]
    assert scale(said(RIGHT, WRONG, WRONG, RIGHT), [GOLD] * 4, ids) == pytest.approx([0.75, -0.75, -1.0, 0.5])
    assert scale(said(RIGHT), ["unreadable"], [[1]]) == [None]
