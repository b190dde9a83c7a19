"""Remedies name what a run's owner types."""

from pathlib import Path

import pytest

from upweight.runs.remedies import as_typed

RULE = "try it with `upweight rewards CONFIG`, or go on from before (`resume_from_checkpoint=RUN/checkpoint-N`)"
SCRIPT = "go on from before (`trainer.train(resume_from_checkpoint='RUN/checkpoint-N')`)"
WHOLE = [(30, Path("my runs/checkpoint-30")), (20, Path("my runs/checkpoint-20")), (10, Path("my runs/checkpoint-10"))]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("rl: grpo\n")
    return tmp_path


def test_the_config_and_the_newest_checkpoint_from_before_are_named(folder):
    typed = as_typed(RULE, {"step": 26, "steps": 5}, folder, {}, WHOLE)
    assert f"`upweight rewards {folder / 'config.yaml'}`" in typed
    assert "`resume_from_checkpoint='my runs/checkpoint-20'`" in typed


def test_a_script_is_named_the_call(folder):
    typed = as_typed(SCRIPT, {"step": 10, "steps": 0}, folder, {"settings": {}}, WHOLE)
    assert typed == "go on from before (`trainer.train(resume_from_checkpoint='my runs/checkpoint-10')`)"


def test_where_none_of_before_is_left_nothing_is_to_be_typed(folder):
    typed = as_typed(RULE, {"step": 9, "steps": 3}, folder, {}, WHOLE)
    assert typed.endswith("from before (none of before is left)")


def test_without_a_config_its_place_stays(tmp_path):
    assert "`upweight rewards CONFIG`" in as_typed(RULE, {"step": 40}, tmp_path, {}, WHOLE)
