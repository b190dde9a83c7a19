"""What is said of rewards that are tried alone."""

from dataclasses import replace

from made_rewards import reward_call
from upweight.rewards.load import as_rewards
from upweight.rewards.trial import remarks, try_rewards

CALL = reward_call(["a", "bb", "cccccccccccc"], ["dd", "e", "ff"])


def as_messages(call):
    return replace(call, completions=[[{"role": "assistant", "content": text}] for text in call.completions])


def length(completions):
    return [float(len(text)) for text in completions]


def long_enough(completions):
    return [1.0 if len(completion) > 10 else 0.0 for completion in completions]


length.__module__ = long_enough.__module__ = "__main__"  # so that they run here: to import this file takes seconds


def test_a_good_reward_has_figures_and_no_remark():
    (trial,) = try_rewards(as_rewards(length), CALL)
    assert remarks([trial]) == []
    figures = trial.summary()
    assert (figures["mean"], figures["lowest"], figures["highest"]) == (20 / 6, 1.0, 12.0)
    assert (figures["does_not_apply"], figures["failed"], figures["completions"]) == (0, 0, 6)
    group_stds = (((1 - 5) ** 2 + (2 - 5) ** 2 + (12 - 5) ** 2) / 2) ** 0.5, (1 / 3) ** 0.5
    assert abs(figures["spread_within_groups"] - sum(group_stds) / 2) < 1e-9
    assert trial.extremes(1) == ([2], [4])


def test_a_reward_that_measures_the_message_list_is_found_out():
    (trial,) = try_rewards(as_rewards(long_enough), as_messages(CALL))
    assert trial.on_text == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    said = remarks([trial])
    assert len(said) == 2
    assert "gives 0 to every completion" in said[0]
    assert "seems to measure the message list" in said[1]
    assert trial.extremes(2) == ([], [])


def test_a_constant_reward_that_reads_messages_rightly_is_not_accused():
    def reads_content(completions):
        return [float("z" in completion[0]["content"]) for completion in completions]

    (trial,) = try_rewards(as_rewards(reads_content), as_messages(CALL))
    assert trial.on_text is None
    assert len(remarks([trial])) == 1


def test_a_constant_that_float32_rounds_is_not_accused():
    (trial,) = try_rewards(as_rewards(lambda completions: [0.3 for _ in completions]), as_messages(CALL))
    assert trial.on_text == [0.3] * 6
    (said,) = remarks([trial])
    assert "gives 0.3 to every completion" in said


def test_a_reward_that_fails_alike_on_texts_and_messages_is_not_accused():
    def infinite(completions):
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [float("inf") if len(text) > 10 else 1.0 for text in texts]

    (trial,) = try_rewards(as_rewards(infinite), as_messages(CALL))
    assert not any("message list" in remark for remark in remarks([trial]))


def test_a_reward_that_only_knows_the_prompt_is_named():
    (trial,) = try_rewards(as_rewards(lambda prompts, completions: [float(prompt[-1]) for prompt in prompts]), CALL)
    assert [True for remark in remarks([trial]) if "never within a group" in remark] == [True]


def test_failures_do_not_keep_others_from_being_tried():
    def raises(completions):
        raise ValueError("no such key")

    def short(completions):
        return [1.0]

    def some(completions):
        if "e" in completions:
            raise KeyError("gone")
        return [1.0, 2.0, None]

    trials = try_rewards(as_rewards([raises, short, some, length]), CALL)
    said = remarks(trials)
    assert said[0].startswith("reward 'raises' always fails: ValueError: no such key (test_trial.py, line")
    assert said[1].startswith("reward 'short' always fails: it must return a list of 6 numbers")
    assert said[2] == "reward 'some' failed on 3 of 6 completions; see the warning above"
    assert trials[2].summary()["does_not_apply"] == 1
    assert [trial.summary()["failed"] for trial in trials] == [6, 6, 3, 0]


def test_none_throughout_and_groups_without_signal_are_said():
    trials = try_rewards(as_rewards([lambda completions: [None] * len(completions)]), CALL)
    assert remarks(trials) == ["reward '<lambda>' applies to none of the completions (None throughout)"]
    trials = try_rewards(as_rewards([lambda completions: [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]), CALL)
    assert remarks(trials) == ["no reward separates the completions of 1 of 2 prompts: their advantages are 0"]


def test_rewards_on_different_scales_are_named_unless_weights_or_the_method_mend_it():
    def small(completions):
        return [len(text) / 1000 for text in completions]

    trials = try_rewards(as_rewards([length, small]), CALL)
    (said,) = remarks(trials)
    assert said.startswith("reward 'length' varies 1000 times as much as 'small'")
    assert remarks(trials, [0.001, 1.0]) == []
    assert remarks(trials, each_scaled=True) == []
