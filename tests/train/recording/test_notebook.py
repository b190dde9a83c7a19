"""The table of a notebook, with a stand-in for IPython, which is installed where notebooks are."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from upweight.train.recording.notebook import columns, evaluated_columns, show_metrics_in_notebook

TRANSFORMERS = "transformers.utils.notebook"


@pytest.fixture
def page(monkeypatch):
    """What the notebook shows, newest last."""
    shown = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.display, display.HTML = display, str
    display.display = lambda html, display_id: shown.append(html) or SimpleNamespace(update=shown.append)
    for name, module in (("IPython", ipython), ("IPython.display", display), (TRANSFORMERS, ModuleType("unused"))):
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules[TRANSFORMERS]
    return shown


@pytest.fixture
def table(page):
    """The callback that takes the place of the Trainer's."""
    theirs = importlib.import_module(TRANSFORMERS).NotebookProgressCallback()
    callbacks = [TrainerCallback(), theirs, TrainerCallback()]
    show_metrics_in_notebook(SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks)))
    assert isinstance(callbacks[1], type(theirs))
    assert callbacks[1] is not theirs
    return callbacks[1]


ARGS = SimpleNamespace(eval_strategy="no")


def state(step):
    return TrainerState(global_step=step, max_steps=60, num_train_epochs=1, epoch=step / 60)


def test_the_table_has_what_says_how_the_run_goes(table, page):
    table.on_train_begin(ARGS, state(0), TrainerControl())
    logs = {"loss": 0.5, "reward": 1.25, "rewards/short/mean": 0.75, "rewards/short/std": 0.1, "num_tokens": 9}
    table.on_step_end(ARGS, state(1), TrainerControl())
    table.on_log(ARGS, state(1), TrainerControl(), logs=logs)
    for shown in ("Training Loss", "reward", "1.250000", "rewards/short/mean", "0.750000"):
        assert shown in page[-1]
    assert "num_tokens" not in page[-1]
    assert "std" not in page[-1]


def test_columns_keep_their_order_and_are_no_tags():
    logs = {"kl": 0.1, "rewards/<lambda>/mean": 2.0, "reward": 1.0}
    assert [*columns(logs)] == ["reward", "rewards/&lt;lambda&gt;/mean", "kl"]


def test_an_evaluation_adds_the_same_metrics_and_keeps_its_own_whole(table, page):
    evaluating = SimpleNamespace(eval_strategy="steps")
    table.on_train_begin(evaluating, state(0), TrainerControl())
    metrics = {"eval_loss": 0.25, "eval_reward": 1.5, "eval_reward_max": 2.0, "eval_num_tokens": 9, "eval_runtime": 3.0}
    table.on_evaluate(evaluating, state(3), TrainerControl(), metrics=metrics)
    table.on_step_end(evaluating, state(4), TrainerControl())
    assert "<th>Validation Loss</th>\n      <th>Reward</th>\n    </tr>" in page[-1]
    assert metrics["eval_runtime"] == 3.0
    named = {"eval_few_loss": 0.25, "eval_few_rewards/<lambda>/mean": 1.0, "eval_few_rewards/<lambda>/std": 1.0}
    assert [*evaluated_columns(named)] == ["eval_few_loss", "eval_few_rewards/&lt;lambda&gt;/mean"]


def test_a_run_that_ends_early_at_its_second_step_ends_without_an_error(table, page):
    table.on_train_begin(ARGS, state(0), TrainerControl())
    table.on_step_end(ARGS, state(1), TrainerControl())
    table.on_step_end(ARGS, state(2), TrainerControl())
    table.on_train_end(ARGS, state(2), TrainerControl())
    assert "[ 2/60" in page[-1]


def test_elsewhere_nothing_is_replaced():
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[TrainerCallback()]))
    before = [*trainer.callback_handler.callbacks]
    show_metrics_in_notebook(trainer)
    assert trainer.callback_handler.callbacks == before
