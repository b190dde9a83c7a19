"""The adaptive weight and the printing reward."""

import pickle
from types import SimpleNamespace

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin.adaptive import AdaptiveReward, DebugReward


def marks(completions, **columns):
    return [None if text == "none" else float(text) for text in completions]


def test_weight_rises_when_few_succeed_and_falls_when_most_do():
    reward = AdaptiveReward(marks)
    assert reward(["0", "1", "none", "0", "0", "0"]) == [0, 1, None, 0, 0, 0]
    assert reward.weight == pytest.approx(1.2)
    assert reward(["1", "1"]) == pytest.approx([1.2, 1.2])
    assert reward.weight == pytest.approx(1.08)
    reward(["0", "1"])
    assert reward.weight == pytest.approx(1.08)


def test_parts_are_weighed_and_their_sum_succeeds_or_not():
    forms = {"tokens": [0.25, 0.5], "steps": [(1, 0.1), (3, 0.2)], "text": {"characters": [(4, 1.0)]}, "one": 1.0}
    reward = AdaptiveReward(lambda completions, **_: [forms[text] for text in completions], weight=2.0)
    first = reward(["tokens", "steps", "text", "one"])
    assert first == [[0.5, 1.0], [(1, 0.2), (3, 0.4)], {"characters": [(4, 2.0)]}, 2.0]
    assert reward.weight == 2.0  # three of four reach 0.5, which is between low and high
    reward(["steps"])
    assert reward.weight == pytest.approx(2.4)
    assert AdaptiveReward(reward)(["tokens"])[0] == pytest.approx([0.6, 1.2])


def test_what_is_no_reward_names_the_wrapped_function():
    def halves(completions, **columns):
        return [0.5]

    with pytest.raises(UserError, match=r"reward 'adaptive_halves' must return a list of 2 numbers"):
        AdaptiveReward(halves)(["a", "b"])


def test_weight_is_bounded():
    reward = AdaptiveReward(marks, minimum=0.5, maximum=2.0)
    for _ in range(50):
        reward(["0"])
    assert reward.weight == 2.0
    for _ in range(50):
        reward(["1"])
    assert reward.weight == 0.5


def test_weight_stands_still_within_a_step():
    reward, logged = AdaptiveReward("exact"), []
    for step, answer in ((1, "wrong"), (1, "wrong"), (2, "a"), (2, "a"), (3, "a")):
        state = SimpleNamespace(global_step=step)
        reward(["a"], answer=[answer], trainer_state=state, log_metric=lambda name, value: logged.append((name, value)))
    assert [name for name, _ in logged] == ["adaptive_exact/weight"] * 5
    assert [value for _, value in logged] == pytest.approx([1, 1, 1.2, 1.2, 1.08])


def test_state_continues_exactly():
    one, two = AdaptiveReward(AdaptiveReward(marks)), AdaptiveReward(AdaptiveReward(marks))
    one(["0"])
    two.restore(pickle.loads(pickle.dumps(one.state())))
    assert one(["0"]) == two(["0"])
    assert one.state() == two.state()
    assert two.reward.weight == pytest.approx(1.44)
    assert one.stateful


def test_nothing_known_moves_nothing():
    reward = AdaptiveReward(marks)
    assert reward(["none", "nan"])[0] is None
    assert reward([]) == []
    assert reward.weight == 1.0


def test_async_is_refused():
    async def later(completions, **columns):
        return [1.0]

    with pytest.raises(UserError, match="async"):
        AdaptiveReward(later)


def test_debug_prints_the_first_and_scores_one(capsys):
    assert DebugReward(show=1, width=5)([[{"role": "assistant", "content": "\x1b[31mhello"}], "second"]) == [1, 1]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "completion 0: \\x1b[31m...\n"
