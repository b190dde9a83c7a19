"""`upweight methods` lists the methods and prints what one reads and needs, also of a user's."""

import re

import pytest

from upweight.cli.methods import run
from upweight.errors import UserError
from upweight.methods import METHODS

MINE = """
from typing import ClassVar
from upweight.methods import GRPO
from upweight.settings import setting

class Mine(GRPO):
    "GRPO with another advantage."
    shift: float = setting("mine_shift", 0.5, "What is added to advantages.")
"""


def test_all_methods_are_listed(capsys):
    run(None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(METHODS) + 1
    assert any(line.startswith("dpo ") and "The chosen completion" in line for line in lines)


@pytest.mark.parametrize("name", METHODS)
def test_one_method_is_described(name, capsys):
    run(name)
    printed = capsys.readouterr().out
    assert "keys:" in printed
    assert "learning rate when left out" in printed
    assert not re.search(r"\w_T\b", printed)  # names of tensors are for people who write methods


def test_a_users_method_is_described_with_the_keys_it_inherits(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_described.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run("mine_described.py:Mine")
    printed = capsys.readouterr().out
    assert "rl: mine_described.Mine: GRPO with another advantage." in printed
    assert "data: sampled while it trains (online)" in printed
    assert "  mine_shift: What is added to advantages. (a number; 0.5)" in printed
    assert "  trl.beta" in printed


def test_an_unknown_method_is_named():
    with pytest.raises(UserError, match=r"there is no method 'gpro'\. Did you mean 'grpo'"):
        run("gpro")
