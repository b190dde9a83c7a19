import sys
import traceback
from types import ModuleType, SimpleNamespace

import pytest

from upweight.config.sections.model import ModelSection
from upweight.errors import UserError, foreign_cause
from upweight.models.load import load_failures, load_model_config
from upweight.rewards.builtin import builtin_reward


def test_a_script_that_catches_value_errors_catches_ours():
    from upweight import DPOConfig

    with pytest.raises(ValueError, match="beta"):
        DPOConfig(output_dir="unused", beta=-1.0, report_to="none")


def test_what_wraps_value_errors_of_others_lets_ours_through():
    with pytest.raises(UserError, match=r"^mine$"), load_failures("key", "place", "weights"):
        raise UserError("mine")
    with pytest.raises(UserError, match=r"^Reward 'length\(3\)': options are given by name"):
        builtin_reward("length(3)")
    with pytest.raises(UserError, match=r"^Reward 'length': maximum 1 is below minimum 2\.$"):
        builtin_reward("length(minimum=2, maximum=1)")


def test_a_cause_is_that_of_others_if_there_is_one():
    ours, of_others = UserError("inner"), KeyError("theirs")
    outer = UserError("outer")
    outer.__cause__ = ours
    assert foreign_cause(outer) is None
    ours.__cause__ = of_others
    assert foreign_cause(outer) is of_others


def test_a_notebook_shows_the_users_own_lines_and_the_message(monkeypatch):
    shell = SimpleNamespace(InteractiveTB=SimpleNamespace(structured_traceback=traceback.format_exception))
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell, raising=False)
    with pytest.raises(UserError) as caught, load_failures("key", "place", "weights"):
        builtin_reward("length(3)")
    rendered = "".join(caught.value._render_traceback_())
    assert 'builtin_reward("length(3)")' in rendered
    assert "site-packages" not in rendered
    assert "src/upweight" not in rendered
    assert "Reward 'length(3)': options are given by name" in rendered.splitlines()[-1]
    with pytest.raises(UserError) as caught:
        raise UserError("outer") from KeyError("theirs")
    assert "KeyError: 'theirs'" in "".join(caught.value._render_traceback_())


def test_a_notebook_shows_no_traceback_of_packages(monkeypatch, tmp_path):
    shell = SimpleNamespace(InteractiveTB=SimpleNamespace(structured_traceback=traceback.format_exception))
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setattr("IPython.get_ipython", lambda: shell, raising=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        load_model_config(ModelSection(base_model=str(tmp_path)))
    rendered = "".join(caught.value._render_traceback_())
    assert "site-packages" not in rendered
    assert "could not load the config" in rendered.splitlines()[-1]
    with pytest.raises(UserError) as caught, load_failures("key", "place", "weights"):
        _raise_of_the_user()
    assert "_raise_of_the_user()" in "".join(caught.value._render_traceback_())


def _raise_of_the_user() -> None:
    raise ValueError("mine")
