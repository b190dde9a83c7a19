import math

import numpy as np
import pytest
import torch

from upweight.errors import UserError
from upweight.rewards.invoke import RewardFailure, RewardValues, checked_values, invoke


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, True, None],
        (1, 0.5, True, None),
        [np.float32(1), torch.tensor(0.5), np.bool_(True), None],
    ],
)
def test_numbers_of_every_kind_are_taken(returned):
    assert checked_values(returned, "mine", 4) == [1.0, 0.5, 1.0, None]


def test_arrays_and_tensors_are_taken():
    assert checked_values(np.array([1, 2]), "mine", 2) == [1.0, 2.0]
    assert checked_values(torch.tensor([1.0, 2.0]), "mine", 2) == [1.0, 2.0]
    kept = checked_values([math.nan, 10**400], "mine", 2)
    assert isinstance(kept, list)
    assert [str(value) for value in kept] == ["nan", "inf"]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "returned 1"),
        ([1.0, 2.0, 3.0], "returned 3"),
        (1.0, "returned a float"),
        (None, "returned a NoneType: does it end without a `return`?"),
        ("ab", "returned a str"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ([1.0, "2"], "value 1 is a str: '2'"),
        ([["1"], [2.0]], "value 0 is a list"),
        (torch.zeros(2, 2, 3), "value 0 is a list"),
        ([1.0, 1j], "value 1 is a complex"),
    ],
)
def test_other_things_are_refused_in_words(returned, said):
    with pytest.raises(UserError, match=f"^reward 'mine' must return a list of 2 numbers.*{said}"):
        checked_values(returned, "mine", 2)


def test_what_is_logged_comes_with_the_values():
    def reward(completions, log_extra, log_metric):
        log_extra("length", np.array([1, 2]))
        log_metric("mean_length", torch.tensor(1.5))
        return [1.0, 2.0]

    answer = invoke(reward, {"completions": ["a", "bb"]}, ("log_extra", "log_metric"), "mine", 2)
    assert isinstance(answer, RewardValues)
    assert answer.extras == [("length", [1, 2])]
    assert answer.metrics == [("mean_length", 1.5)]


@pytest.mark.parametrize(("column", "said"), [([1], "needs 2 values, got 1"), (3, "got a int")])
def test_wrong_columns_are_refused(column, said):
    def reward(log_extra):
        log_extra("length", column)
        return [1.0, 2.0]

    with pytest.raises(UserError, match=said):
        invoke(reward, {}, ("log_extra",), "mine", 2)


def test_an_error_is_told_with_its_line():
    def reward():
        return [int("x")]

    failure = invoke(reward, {}, (), "mine", 1)
    assert isinstance(failure, RewardFailure)
    line = reward.__code__.co_firstlineno + 1
    assert failure.reason == f"ValueError: invalid literal for int() with base 10: 'x' (test_invoke.py, line {line})"


def test_an_error_for_the_user_ends_the_run():
    def reward():
        raise UserError("there is no column 'answer'")

    with pytest.raises(UserError, match="there is no column 'answer'"):
        invoke(reward, {}, (), "mine", 1)
