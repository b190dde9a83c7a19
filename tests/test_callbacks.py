"""Callbacks of keys, apart from a run; tests/train/test_run.py has the runs."""

import inspect

import pytest
from transformers import TrainerCallback, TrainerState

from upweight import callbacks
from upweight.callbacks import CallbackSection, callbacks_of
from upweight.errors import UserError


def test_a_loss_that_stays_high_ends_the_run(tmp_path):
    section = CallbackSection(loss_limit=2.0, loss_limit_patience=2)
    (limit,) = callbacks_of(section, tmp_path)
    state = TrainerState(global_step=1)

    def log(**logs):
        logs |= limit.metrics(state, logs)
        limit.on_log(None, state, None, logs=logs)
        return logs

    assert [log(loss=loss)["loss_watchdog/logs_above"] for loss in (3.0, 1.0, 3.0)] == [1, 0, 1]
    assert log(eval_loss=9.0) == {"eval_loss": 9.0}
    with pytest.raises(
        UserError, match=r"above loss_watchdog_threshold \(2\) in 2 logs in a row, now 4.*Lower .learning_rate"
    ):
        log(loss=4.0)


def test_a_run_that_its_loss_ended_says_what_is_left_of_it(tmp_path):
    (limit,) = callbacks_of(CallbackSection(loss_limit=2.0, loss_limit_patience=1), tmp_path)
    logs = {"loss": 3.0}
    limit.metrics(TrainerState(global_step=12), logs)
    left = r"^stopped at step 12: .* No model was saved, and there is no checkpoint\. It was above it from the first"
    with pytest.raises(UserError, match=left):
        limit.on_log(None, TrainerState(global_step=12), None, logs=logs)
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"No model was saved; the last checkpoint is {tmp_path / 'checkpoint-10'}. "):
        limit.on_log(None, TrainerState(global_step=12), None, logs=logs)


def test_nothing_is_called_for_keys_that_are_not_set(tmp_path):
    assert not [*callbacks_of(CallbackSection(), tmp_path)]


def test_every_public_method_is_an_event_of_the_trainer():
    """A misspelt event would never be called; `metrics` is ours."""
    classes = [
        kind for _, kind in inspect.getmembers(callbacks, inspect.isclass) if kind.__module__ == callbacks.__name__
    ]
    methods = [(kind, name) for kind in classes if kind is not CallbackSection for name in vars(kind)]
    public = [(kind.__name__, name) for kind, name in methods if not name.startswith("_")]
    assert public
    assert not [(kind, name) for kind, name in public if name != "metrics" and not hasattr(TrainerCallback, name)]
