"""The reward for programs."""

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin.code import CodeReward
from upweight.rewards.sandbox.run import Limits, SandboxError, run_program

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds."


@pytest.fixture(autouse=True)
def _sandbox():
    try:
        run_program("pass", tests=None, stdin="", limits=Limits(seconds=30))
    except SandboxError as error:
        pytest.skip(f"no sandbox on this system: {error}")


def test_tests_as_text_list_or_json():
    tests = [
        "assert add(1, 2) == 3",
        ["assert add(1, 2) == 3", "assert add(0, 0) == 1"],
        '["assert add(2, 2) == 4"]',
        None,
    ]
    assert CodeReward()([ADD] * 4, tests=tests) == [1, 0, 1, None]
    assert CodeReward(partial=True, score=2.0)([ADD], tests=[tests[1]]) == [1.0]


def test_chat_completions_bad_code_and_no_code():
    texts = [[{"role": "assistant", "content": text}] for text in (ADD, "def add(:", "", "I cannot.", "```python\n```")]
    assert CodeReward(wrong=-1.0)(texts, tests=["assert add(1, 1) == 2"] * 5) == [1, -1, -1, -1, -1]


def test_check_functions_with_an_entry_point():
    tests = ["def check(candidate):\n    assert candidate(2, 3) == 5"]
    assert CodeReward()([ADD], tests=tests, entry_point=["add"]) == [1]
    assert CodeReward()([ADD.replace("+", "-")], tests=tests, entry_point=["add"]) == [0]


def test_expected_output():
    double = "print(2 * int(input()))"
    cases = {"input": ["3", ["1", "2"], ["1", "2"], None], "output": ["6\n", ["2", "4"], ["2", "5"], None]}
    assert CodeReward()([double] * 4, **cases) == [1, 1, 0, None]
    assert CodeReward(partial=True)([double] * 4, **cases) == [1, 1, 0.5, None]
    assert CodeReward()([double], tests=['{"inputs": ["4"], "outputs": ["8"]}']) == [1]


def test_which_block_runs():
    text = "```python\nx = 1\n```\nand\n```python\ny = 2\n```"
    for block, test, score in (("last", "y", 1), ("last", "x", 0), ("first", "x", 1), ("all", "x + y", 1)):
        assert CodeReward(block=block)([text], tests=[test]) == [score]
    assert CodeReward(tag="code")(["<code>x = 1</code> y y", "x = 1"], tests=["x", "x"]) == [1, 0]


def test_time_limit_and_neighbours():
    reward = CodeReward(time_limit=2.0)
    assert reward(["while True: pass", ADD, "import os; os.killpg(0, 9)"], tests=["add(1, 1)"] * 3) == [0, 1, 0]


def test_rows_without_anything_to_check_are_an_error():
    with pytest.raises(UserError, match="'tests'"):
        CodeReward()([ADD], answer=["x"])
    with pytest.raises(UserError, match="1 inputs for 2 outputs"):
        CodeReward()([ADD], input=[["1"]], output=[["1", "2"]])
