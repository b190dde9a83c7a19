from types import SimpleNamespace

import pytest

from made_rewards import reward_call
from upweight.errors import UserError
from upweight.rewards.reward import Reward, RewardParameters, check_columns, parameters_of, plain_state


def test_a_call_is_cut_at_groups():
    call = reward_call(["a", "b"], ["c", "d"], ["e"], answer=["1", "2", "3", "4", "5"])
    assert call.groups() == [(0, 2), (2, 4), (4, 5)]
    assert call.split_for_workers(1) == [(0, 5)]
    assert call.split_for_workers(2) == [(0, 2), (2, 5)]
    assert call.split_for_workers(9) == call.groups()
    part = call.part(2, 5)
    assert (part.completions, part.columns, part.group_S) == (["c", "d", "e"], {"answer": ["3", "4", "5"]}, [1, 1, 2])
    assert reward_call().split_for_workers(3) == []


def test_a_function_gets_what_its_signature_takes():
    call = reward_call(["a", "b"], answer=["1", "2"], level=[3, 4])

    def narrow(completions, answer): ...

    def wide(completions, log_metric=None, **kwargs): ...

    assert parameters_of(narrow, "narrow", "k").arguments(call) == {"completions": ["a", "b"], "answer": ["1", "2"]}
    assert parameters_of(narrow, "narrow", "k").logs == ()
    given = parameters_of(wide, "wide", "k").arguments(call)
    assert set(given) == {"prompts", "completions", "completion_ids", "trainer_state", "answer", "level"}
    assert parameters_of(wide, "wide", "k").logs == ("log_extra", "log_metric")


@pytest.mark.parametrize(
    ("parameter", "column"),
    [("answers", "answer"), ("boxes", "box"), ("categories", "category"), ("class_s", "class_")],
)
def test_a_plural_is_filled_from_the_singular(parameter, column):
    taken = RewardParameters(("completions", parameter), ("completions", parameter), everything=False)
    assert taken.arguments(reward_call(["a"], **{column: ["x"]}))[parameter] == ["x"]
    assert taken.missing_in([column]) == []


def test_a_column_of_the_plural_name_wins():
    taken = RewardParameters(("completions", "answers"), (), everything=False)
    assert taken.arguments(reward_call(["a"], answer=["one"], answers=["many"]))["answers"] == ["many"]


def test_columns_that_nothing_fills_are_named_with_a_suggestion():
    def exact(completions, answer, level=None, **kwargs): ...

    rewards = [Reward("exact", exact, parameters_of(exact, "exact", "k"))]
    check_columns(rewards, ["answer"])
    with pytest.raises(UserError, match=r"reward 'exact' needs the column 'answer'.*Did you mean 'anser'\?") as caught:
        check_columns(rewards, ["question", "anser"])
    assert "Columns: question, anser" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: [], "never gets the completions"),
        (lambda text: [], r"takes \(text\) and so never gets"),
        (lambda *completions: [], "never gets"),
        (lambda completions, /: [], "called by name"),
        (dict.fromkeys, "never gets|cannot be read|called by name"),
    ],
)
def test_wrong_arity_is_said_when_loading(function, said):
    with pytest.raises(UserError, match=said) as caught:
        parameters_of(function, "mine", "trl.reward_funcs")
    assert "mine" in str(caught.value)


def test_the_state_that_travels_is_plain():
    state = SimpleNamespace(global_step=7, log_history=[{"n": n} for n in range(300)], handler=object())
    plain = plain_state(state)
    assert (plain.global_step, len(plain.log_history), plain.log_history[-1]) == (7, 100, {"n": 299})
    assert not hasattr(plain, "handler")
    assert plain_state(None) is None
