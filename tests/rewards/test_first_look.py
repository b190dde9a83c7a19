import pytest

from upweight.config import load_config
from upweight.rewards.first_look import reward_problems

FILE = """
from elsewhere import borrowed
import math

def good(completions, **columns):
    import os
    return [1.0] * len(completions)

if math.pi > 3:
    late = good

class Scored:
    pass
"""


def problems(folder, *names, text=FILE):
    (folder / "mine.py").write_text(text)
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    listed = ", ".join(f'"{name}"' for name in names)
    (folder / "config.yaml").write_text(
        f"base_model: m\nrl: grpo\ndatasets: [{{path: rows.jsonl}}]\noutput_dir: out\nmax_steps: 1\n"
        f"trl: {{reward_funcs: [{listed}]}}\n"
    )
    return list(reward_problems(load_config(folder / "config.yaml")))


@pytest.mark.parametrize("name", ["mine.good", "mine.py:good", "mine.late", "mine.borrowed", "mine.Scored"])
def test_names_that_a_file_defines_are_no_problem(name, tmp_path):
    assert problems(tmp_path, name) == []


def test_a_name_that_a_file_does_not_define_is_answered_with_the_nearest(tmp_path):
    (problem,) = problems(tmp_path, "mine.god", "mine.good")
    assert "mine.py has no function 'god'. Did you mean 'good'?" in problem


def test_files_are_read_and_not_run(tmp_path):
    assert problems(tmp_path, "mine.good", text="raise SystemExit\n" + FILE) == []
    (problem,) = problems(tmp_path, "mine.good", text="def good(:\n")
    assert "mine.py, line 1: " in problem


@pytest.mark.parametrize("text", ["from elsewhere import *", "def __getattr__(name): return print"])
def test_a_file_that_may_have_any_name_is_no_problem(text, tmp_path):
    assert problems(tmp_path, "mine.good", text=text) == []


def test_files_that_are_not_here_and_built_in_rewards_are_left_to_training(tmp_path):
    assert problems(tmp_path, "package.module.reward", "length") == []


def test_a_module_that_is_not_here_is_answered_with_a_file_of_a_similar_name(tmp_path):
    (problem,) = problems(tmp_path, "mines.good", "elsewhere.good", "json.loads")
    assert problem == "trl.reward_funcs: there is no mines.py here, and no such package. Did you mean 'mine'?"
