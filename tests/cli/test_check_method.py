"""`upweight check-method` takes a file, a function of it, or a config, and exits with 1 where something is wrong."""

import pytest
import typer

from upweight.cli.check_method import run
from upweight.doctor.method_check.targets import methods_of
from upweight.errors import UserError

MINE = """
import torch

def loss(ratio, advantages, mask, lengths, clip: float = 0.2):
    return -(torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages) * mask).sum(1) / lengths

def wrong(ratio, advantages, mask):
    return -ratio * advantages / mask.sum()

def center(rewards, groups):
    return rewards

def pairs(chosen_log_ratio, rejected_log_ratio, beta):
    return -beta * (chosen_log_ratio - rejected_log_ratio)

def labelled(log_ratio, desirable):
    return torch.where(desirable, -log_ratio, log_ratio)

def helper(x):
    return x
"""
UNCLEAR = """
def either(logps, ref_logps, mask, beta):
    return -beta * ((logps - ref_logps) * mask).sum(1)

def pairs(chosen_log_ratio, rejected_log_ratio, beta):
    return -beta * (chosen_log_ratio - rejected_log_ratio)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "checked_losses.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text("rl: grpo\ntrl: {loss_type: checked_losses.loss}\nmethod_args: {clip: 0.3}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_has_its_losses_and_advantages_each_in_its_place(folder):
    found = methods_of("checked_losses.py", {}, None, folder)
    places = {name.rpartition(".")[2]: method.name for name, method in found.items()}
    assert places == {"loss": "grpo", "wrong": "grpo", "center": "grpo", "pairs": "dpo", "labelled": "kto"}


def test_one_function_takes_its_settings_and_a_place(folder):
    (method,) = methods_of("checked_losses.py:loss", {"clip": 0.5}, None, folder).values()
    assert method.model_dump()["method_args"] == {"clip": 0.5}
    with pytest.raises(UserError, match="Did you mean 'clip'"):
        methods_of("checked_losses.py:loss", {"clipp": 0.5}, None, folder)
    with pytest.raises(UserError, match="Say which with --as"):
        methods_of("checked_losses.py:helper", {}, None, folder)


def test_a_helper_that_looks_like_advantages_is_told_how_to_be_one(folder):
    text = "def group_mean(values, groups):\n    return values\n\ndef center(rewards, groups):\n    return rewards\n"
    (folder / "with_helper.py").write_text(text)
    found = methods_of("with_helper.py", {}, None, folder)
    assert found["with_helper.center"].name == "grpo"
    message = str(found["with_helper.group_mean"])
    assert "asks for 'values', which is neither" in message
    assert message.endswith("If it is a helper that another function calls, begin its name with an underscore.")
    (folder / "with_hidden_helper.py").write_text(text.replace("group_mean", "_group_mean"))
    assert list(methods_of("with_hidden_helper.py", {}, None, folder)) == ["with_hidden_helper.center"]


def test_a_loss_whose_place_is_not_clear_is_never_left_out(folder, capsys):
    (folder / "unclear_losses.py").write_text(UNCLEAR)
    with pytest.raises(typer.Exit) as end:
        run("unclear_losses.py", [], None)
    assert end.value.exit_code == 1
    printed = capsys.readouterr().out
    unclear, _, clear = printed.partition("unclear_losses.pairs")
    assert "WRONG  cannot be checked" in unclear
    assert "'unclear_losses.either' can be a loss of dpo or kto or grpo. Say which with --as (" in unclear
    assert "ok     masks" in clear
    found = methods_of("unclear_losses.py", {"trl.beta": 0.3}, "grpo", folder)
    assert {name.rpartition(".")[2]: method.name for name, method in found.items()} == {
        "either": "grpo",
        "pairs": "dpo",
    }
    assert found["unclear_losses.either"].model_dump()["beta"] == 0.3


def test_settings_of_a_file_reach_the_functions_that_have_them(folder):
    found = methods_of("checked_losses.py", {"clip": 0.5, "rl_beta": 0.2}, None, folder)
    dumped = {name.rpartition(".")[2]: method.model_dump() for name, method in found.items()}
    assert dumped["loss"]["method_args"] == {"clip": 0.5}
    assert dumped["pairs"]["beta"] == 0.2
    assert dumped["center"]["method_args"] == dumped["pairs"]["method_args"] == {}
    assert "Did you mean 'clip'" in str(
        methods_of("checked_losses.py", {"clpi": 0.5}, None, folder)["checked_losses.loss"]
    )


def test_a_right_one_passes_and_a_wrong_one_exits_with_1(folder, capsys):
    run("run.yaml", ["method_args.clip=0.1"], None)
    assert "WRONG" not in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        run("checked_losses.py:wrong", [], None)
    printed = capsys.readouterr().out
    assert "ok     runs" in printed
    assert "WRONG  any cut into micro-batches" in printed


NEARLY = """
def loss(chosen_logratios, rejected_logratios, beta):
    return -beta * (chosen_logratios - rejected_logratios)

def helper(x):
    return x
"""


def test_names_that_are_nearly_right_are_said_and_helpers_named(folder, capsys):
    (folder / "nearly.py").write_text(NEARLY)
    with pytest.raises(typer.Exit):
        run("nearly.py", [], None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "'nearly.loss' asks for 'chosen_logratios', 'rejected_logratios', which nothing passes." in printed
    assert "Did you mean 'chosen_log_ratio' and 'rejected_log_ratio'?" in printed
    assert "not checked: helper (helpers" in printed
    (folder / "other_things.py").write_text("def scale(x, by):\n    return x * by\n")
    with pytest.raises(UserError, match="'scale' asks for x, by"):
        methods_of("other_things.py", {}, None, folder)


CLASSES = """
from typing import ClassVar
from upweight.methods.base import Method, pair_counts, required, sequence_sum
from upweight.types import Loss

class Plain(Method):
    "A difference of log-probs."
    data: ClassVar = "pairs"

    def count(self, batch):
        return pair_counts(batch)

    def term(self, chosen, rejected):
        return rejected - chosen

    def loss(self, out, batch, prepared):
        sides = sequence_sum(required(out.logps_T), batch)[required(batch.pair_P2)].unbind(1)
        return Loss({"pairs": self.term(*sides).sum()})

class Detached(Plain):
    def term(self, chosen, rejected):
        return (rejected - chosen).detach()

class Logarithm(Plain):
    def term(self, chosen, rejected):
        return (rejected - chosen).log()

class Reference(Plain):
    def loss(self, out, batch, prepared):
        return Loss({"pairs": (out.logps_T - out.ref_logps_T).sum()})

class RequiredReference(Plain):
    def loss(self, out, batch, prepared):
        return Loss({"pairs": (out.logps_T - required(out.ref_logps_T)).sum()})

class Entropy(Plain):
    def loss(self, out, batch, prepared):
        return Loss({"pairs": (out.logps_T - out.entropy_T).sum()})

class Indexing(Plain):
    def term(self, chosen, rejected):
        gap = rejected - chosen
        return gap[gap > 0]
"""
WORDS = {
    "Detached": "rl: 'own_classes.Detached': the loss (own_classes.py, line 16) has no gradient to the weights",
    "Logarithm": "rl: 'own_classes.Logarithm': the sum 'pairs' of loss (own_classes.py, line 16) is NaN or infinite",
    "Reference": "rl: 'own_classes.Reference' reads out.ref_logps_T (own_classes.py, line 30), which is not computed: "
    "`needs_reference = True` is missing",
    "RequiredReference": "reads out.ref_logps_T (own_classes.py, line 34), which is not computed: `needs_reference",
    "Entropy": 'add it to `reads: ClassVar = frozenset({"entropy_T"})`',
    "Indexing": "bool(), float(): rl: 'own_classes.Indexing' (own_classes.py, line 43)",
}


def test_mistakes_of_classes_are_said_in_words_with_class_and_file(folder, capsys):
    (folder / "own_classes.py").write_text(CLASSES)
    with pytest.raises(typer.Exit):
        run("own_classes.py", [], None)
    printed = " ".join(capsys.readouterr().out.split())
    for name, words in WORDS.items():
        assert words in printed, name
    assert "RuntimeError" not in printed
    assert "register_meta" not in printed
    plain = printed.partition("own_classes.Plain")[2].partition("own_classes.Detached")[0]
    assert "WRONG" not in plain
