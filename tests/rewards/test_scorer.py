import logging
import re

import pytest

from made_rewards import file_scorer, reward_call
from upweight.errors import UserError
from upweight.rewards.load import as_rewards
from upweight.rewards.reward import RewardCall, check_columns
from upweight.rewards.scorer import Scorer


def test_rewards_of_every_kind_have_their_columns(tmp_path):
    code = "def in_file(completions):\n    return [len(text) for text in completions]\n"
    with file_scorer(tmp_path, code, "in_file") as scorer:
        in_file = scorer.rewards[0]

    async def later(completions):
        return [-1.0] * len(completions)

    here = as_rewards([lambda completions: [None, 2.0, 3.0], later])
    with Scorer([here[0], in_file, here[1]], workers=2) as scorer:
        scores = scorer.score(reward_call(["a", "bb"], ["ccc"]))
        assert scores.rewards_SR[:, 1:].tolist() == [[1.0, -1.0], [2.0, -1.0], [3.0, -1.0]]
        assert scores.rewards_SR[:, 0].isnan().tolist() == [True, False, False]
        assert scorer.names == ["<lambda>", "in_file", "later"]


def test_messages_stay_messages():
    seen = []

    def reward(prompts, completions):
        seen.append((prompts, completions))
        return [1.0]

    prompt, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    with Scorer(as_rewards(reward)) as scorer:
        scorer.score(RewardCall([prompt], [answer], [[1]], {}, [0]))
    assert seen == [([prompt], [answer])]


def test_logged_numbers_are_averaged_and_columns_completed():
    def reward(completions, log_extra, log_metric):
        if "x" in completions:
            raise ValueError
        log_metric("seen", len(completions))
        log_extra("text", completions)
        return [1.0] * len(completions)

    with Scorer(as_rewards(reward)) as scorer:
        scores = scorer.score(reward_call(["a", "b"], ["x"], ["c", "d", "e", "f"]))
    assert scores.metrics["seen"] == 3.0
    assert scores.extras == {"text": ["a", "b", None, "c", "d", "e", "f"]}


def test_values_that_are_not_finite_fail_alone(caplog):
    with Scorer(as_rewards(lambda completions: [1.0, float("nan"), float("-inf")])) as scorer:
        scores = scorer.score(reward_call(["a", "b", "c"]))
    assert scores.rewards_SR.isnan().tolist() == [[False], [True], [True]]
    assert scores.metrics["rewards/<lambda>/failed"] == 2
    assert "failed on 2 of 3 completions: it returned NaN, infinity or more than 1e18; return None" in caplog.text


def test_failures_are_warned_of_when_they_double_and_summed_at_the_end(caplog):
    caplog.set_level(logging.WARNING)
    with Scorer(as_rewards(lambda completions: [1.0, float("nan")])) as scorer:
        for _ in range(8):
            scorer.score(reward_call(["a", "b"]))
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 4
    assert caplog.records[-1].getMessage() == "reward '<lambda>' failed on 8 of 16 completions"


def test_one_bad_group_is_forgiven_where_the_reward_has_worked():
    def reward(completions):
        return [float(text) for text in completions]

    with Scorer(as_rewards(reward)) as scorer:
        scorer.score(reward_call(["1", "2"]))
        assert scorer.score(reward_call(["x", "2"])).rewards_SR.isnan().all()
        with pytest.raises(UserError, match="failed on all 2 completions: ValueError"):
            scorer.score(reward_call(["x", "2"]))
    with Scorer(as_rewards(reward)) as scorer:
        scorer.score(reward_call(["1", "2"]))
        with pytest.raises(UserError, match="failed on all 2 completions"):
            scorer.score(reward_call(["x"], ["y"]))


@pytest.mark.parametrize(
    "read", [lambda text: len(text.strip()), lambda text: re.match("a", text) is None, lambda one: one["content"]]
)
def test_a_reward_that_takes_messages_for_text_is_told_where_the_text_is(read):
    call = reward_call([[{"role": "assistant", "content": "a"}]])
    rewards = as_rewards(lambda completions: [read(one) for one in completions])
    with Scorer(rewards) as scorer, pytest.raises(UserError, match=r"read completion\[0\]\['content'\]\.$"):
        scorer.score(call)


@pytest.mark.parametrize("read", [lambda text: len(text[0]["content"]), lambda text: text[0].get("content")])
def test_a_reward_that_takes_text_for_messages_gets_a_hint(read):
    rewards = as_rewards(lambda completions: [read(one) for one in completions])
    said = r"TypeError: string indices.* is a plain string: .*list of messages\)\.$|AttributeError.* is a plain string"
    with Scorer(rewards) as scorer, pytest.raises(UserError, match=said):
        scorer.score(reward_call(["a"]))


def test_nothing_to_score_is_no_failure(tmp_path):
    code = "def reward(completions):\n    return [1.0] * len(completions)\n"
    with file_scorer(tmp_path, code, "reward") as scorer:
        assert scorer.score(reward_call()).rewards_SR.shape == (0, 1)


def test_a_state_that_json_cannot_hold_is_refused():
    class Odd:
        def __call__(self, completions):
            return [1.0]

        def state_dict(self):
            return {"when": object()}

        def load_state_dict(self, state):
            raise AssertionError

    with Scorer(as_rewards([Odd(), lambda completions: [1.0]])) as scorer:
        with pytest.raises(UserError, match="reward 'Odd': its state must be JSON-serializable"):
            scorer.state()
        scorer.restore({})


def test_a_function_with_a_plural_parameter_and_a_fault_is_told_by_its_line(tmp_path):
    code = """
def right(prompts, completions, answers, **kwargs):
    return [float(text == answer) for text, answer in zip(completions, answers)]
def faulty(completions, answers, **kwargs):
    return [score for _ in answers]
"""
    call = reward_call(["4", "5"], answer=["4", "4"])
    with file_scorer(tmp_path, code, "right") as scorer:
        check_columns(scorer.rewards, call.columns)
        assert scorer.score(call).rewards_SR.tolist() == [[1.0], [0.0]]
    said = r"'faulty' failed on all 2 .*NameError: name 'score' .*line 5\)"
    with file_scorer(tmp_path, code, "right", "faulty") as scorer, pytest.raises(UserError, match=said):
        scorer.submit(call).result(timeout=60)


@pytest.mark.parametrize("calls", [1, 200])
def test_a_reward_that_never_applies_is_told_of_once(caplog, calls):
    with Scorer(as_rewards([lambda completions: [None, None], lambda completions: [None, 1.0]])) as scorer:
        for _ in range(calls):
            scorer.score(reward_call(["a", "b"]))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "reward '<lambda>' returned None for each of" in said[0]


def test_nothing_but_none_stops_a_run_by_name(caplog):
    call, scored = reward_call(*[["a", "b"]] * 4), "returned None for each of 32 completions of 16 prompts"
    with Scorer(as_rewards(lambda completions: [None] * len(completions))) as scorer:
        for _ in range(3):
            scorer.score(call)
        with pytest.raises(UserError, match=f"^reward '<lambda>' {scored}: .* Return a number, 0.0 where"):
            scorer.score(call)
    both = [lambda completions: [None] * 8, lambda completions: [0.0 if at == 5 else None for at in range(8)]]
    with Scorer(as_rewards(both)) as scorer:  # one applies, if only once and by 0
        for _ in range(6):
            scorer.score(call)


def test_a_few_prompts_without_a_reward_are_no_reason_to_stop():
    with Scorer(as_rewards(lambda completions: [None] * len(completions))) as scorer:
        scorer.score(reward_call(*[["a", "b"]] * 40))
        for _ in range(2):
            scorer.score(reward_call(["a", "b"]))


def test_the_share_of_failures_is_logged_from_the_first_one_on():
    answers = iter([[1.0, 1.0], [1.0, float("nan")], [1.0, 1.0]])
    with Scorer(as_rewards(lambda completions: next(answers))) as scorer:
        shares = [scorer.score(reward_call(["a", "b"])).metrics.get("rewards/<lambda>/failed_share") for _ in range(3)]
    assert shares == [None, 0.5, 0.0]
