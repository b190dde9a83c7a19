"""Which trials a sweep has, and what it refuses before the first."""

import pytest

from made_runs import write_config
from upweight.errors import UserError
from upweight.runs.sweep.plan import Trial, check_trials, plan_trials, split_values


def test_values_are_split_at_commas_outside_brackets_and_quotes():
    assert split_values("1e-6,1e-5") == ["1e-6", "1e-5"]
    assert split_values("[a,b],[c]") == ["[a,b]", "[c]"]
    assert split_values("{x: 1, y: 2}") == ["{x: 1, y: 2}"]
    assert split_values("'a,b', c") == ["'a,b'", "c"]


def test_all_combinations_are_tried_and_names_are_stable():
    shared, trials = plan_trials(["learning_rate=1e-6,1e-5", "max_steps=3", "lora_r=4,8"])
    assert shared == ["max_steps=3"]
    assert [trial.overrides() for trial in trials] == [
        ["learning_rate=1e-6", "lora_r=4"],
        ["learning_rate=1e-6", "lora_r=8"],
        ["learning_rate=1e-5", "lora_r=4"],
        ["learning_rate=1e-5", "lora_r=8"],
    ]
    assert trials[0].name == "learning_rate_1e-6__lora_r_4"
    odd = [Trial((("path", value),)).name for value in ("a/b", "a:b", "x" * 200)]
    assert len(set(odd)) == 3
    assert all(len(name) <= 80 and "/" not in name for name in odd)


def test_some_are_drawn():
    arguments = ["learning_rate=1,2,3,4", "seed=1,2,3"]
    _, all_of_them = plan_trials(arguments)
    _, some = plan_trials(arguments, most=5, seed=1)
    assert len(some) == 5
    assert set(some) < set(all_of_them)
    assert some == plan_trials(arguments, most=5, seed=1)[1]
    assert some != plan_trials(arguments, most=5, seed=2)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["learning_rate"], "expected KEY=VALUE"),
        (["max_steps=3"], "at least one key with several values"),
        (["learning_rate=1,,2"], "empty or stands twice"),
        (["learning_rate=1,1"], "empty or stands twice"),
        (["seed=1,2", "seed=3,4"], "in two places"),
        (["seed=1,2", "output_dir=x"], "--output"),
    ],
)
def test_what_is_no_sweep_is_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        plan_trials(arguments)


def test_errors_of_all_trials_come_before_the_first(tmp_path):
    config = write_config(tmp_path, tmp_path / "model")
    shared, trials = plan_trials(["learning_rate=1e-3,fast", "micro_batch_size=2,0"])
    with pytest.raises(UserError) as raised:
        check_trials(config, shared, trials, tmp_path / "sweep")
    assert str(raised.value).count("learning_rate: ") == 2
    assert str(raised.value).count("micro_batch_size: ") == 2
