"""The demo from end to end where its model cannot be had."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from upweight.config import load_config

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.mark.slow
def test_a_tiny_model_stands_in_without_a_network(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    demo = _demo()

    demo.main(["max_steps=2"], ["num_epochs=1"])

    shown = capsys.readouterr().out
    assert "cannot be had" in shown
    assert "Reward of the 2 training steps" in shown
    assert str(demo.RUN / "metrics.jsonl") in shown
    assert str(demo.RUN / "report.html") in shown
    assert (tmp_path / demo.RUN / "report.html").is_file()
    asked = [json.loads(line)["prompt"][-1]["content"] for line in (DEMO / "held_out.jsonl").read_text().splitlines()]
    assert all(question in shown for question in asked)
    newest = max(tmp_path.rglob("metrics.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    assert newest == tmp_path / demo.RUN / "metrics.jsonl"


def test_the_curve_has_a_bar_for_each_step():
    lines = _demo().curve([0.1, 0.5, 1.0], "#").splitlines()
    assert [line.count("##") for line in lines[:10]] == [1, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert lines[-1].strip() == "0.10 at first, 1.00 at last"


def test_its_configs_validate_and_no_held_out_question_is_trained_on():
    for name in ("config.yaml", "tiny.yaml"):
        load_config(DEMO / name)
    trained, held_out = (set((DEMO / name).read_text().splitlines()) for name in ("questions.jsonl", "held_out.jsonl"))
    assert trained
    assert held_out
    assert not trained & held_out


def _demo():
    spec = importlib.util.spec_from_file_location("demo_of_examples", DEMO / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
