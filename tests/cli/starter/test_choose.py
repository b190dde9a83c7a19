"""From what somebody has to the command that starts with it."""

import pytest
from typer.testing import CliRunner

from upweight.cli.app import app
from upweight.cli.starter import choose
from upweight.cli.starter.init import STARTERS
from upweight.errors import UserError


def chosen(*arguments):
    return CliRunner().invoke(app, ["choose", *arguments])


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (["--have", "labels"], "kto"),
        (["--have", "teacher"], "distill"),
        (["--have", "pairs", "--want", "policy"], "dpo"),
        (["--have", "pairs", "--want", "scores"], "reward"),
        (["--have", "scores", "--want", "apart"], "gdpo"),
        (["--have", "demonstrations", "--want", "words"], "sft"),
    ],
)
def test_flags_choose(flags, method):
    assert chosen(*flags).stdout == f"upweight init {method}\n"


def ends(question):
    for option in question["options"].values():
        yield from [option["next"]] if isinstance(option["next"], str) else ends(option["next"])


def test_every_starter_can_be_reached_and_nothing_else():
    assert sorted(ends(choose.FIRST_QUESTION)) == sorted(STARTERS)


def test_without_a_terminal_what_is_missing_is_listed():
    with pytest.raises(UserError, match=r"What do you have\?[^?]*--have pairs"):
        raise chosen().exception
    with pytest.raises(UserError, match=r"--have cats: Choose one of these:\n  --have scores"):
        raise chosen("--have", "cats").exception


def test_a_terminal_is_asked_until_it_answers(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    said = iter(["9", "pears", "2", "policy"])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    choose.run({})
    shown = capsys.readouterr().out
    assert "  2  pairs of a better and a worse answer (pairs)" in shown
    assert shown.count("a number from 1 to") == 2
    assert shown.endswith("upweight init dpo\n")
