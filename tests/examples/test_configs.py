"""Every example trains: with a tiny model and a few rows in the form of the dataset that it names."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from made_examples import EXAMPLES, example_model, rows_in_the_form_of, trained
from made_runs import metrics_of
from slow_cases import slow_except
from upweight.config import load_config

ELSEWHERE = ("demo/", "tools/", "gym/", "openenv/", "own_code/")  # tried by tests of their own
ALIKE = ("ebft/llama", "ebft/qwen3-8b")  # differ from others in their sizes
CONFIGS = [
    path
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    if not str(path.relative_to(EXAMPLES)).startswith((*ELSEWHERE, *ALIKE))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return example_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reward_model(model, tmp_path_factory):
    """What reward_then_grpo/reward.yaml leaves."""
    return trained(EXAMPLES / "reward_then_grpo" / "reward.yaml", tmp_path_factory.mktemp("reward"), model, "")


def name_of(example):
    return str(example.relative_to(EXAMPLES))


FAST = ("distill.yaml", "dpo.yaml", "kto.yaml", "orpo.yaml", "sft.yaml", "process_reward.yaml", "gsm8k/config.yaml")


@pytest.mark.parametrize("example", slow_except(FAST, CONFIGS, name_of), ids=name_of)
def test_an_example_validates_and_trains(example, model, request, tmp_path):
    load_config(example)
    needs_one = any("/" in name for name in yaml.safe_load(example.read_text()).get("trl", {}).get("reward_funcs", ()))
    run = Path(trained(example, tmp_path, model, request.getfixturevalue("reward_model") if needs_one else ""))
    if (run / "stages.md").exists():
        assert "imitate" in (run / "stages.md").read_text()
    else:
        assert [row["step"] for row in metrics_of(run) if "loss" in row] == [1]


def test_the_script_trains_with_the_rewards_of_the_recipe(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "gsm8k")
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    spec = importlib.util.spec_from_file_location("gsm8k_script", EXAMPLES / "gsm8k" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    small = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 4, "max_steps": 1}
    raw = Dataset.from_list(rows_in_the_form_of("openai/gsm8k"))
    trainer = script.main(model, raw, output_dir=str(tmp_path), gradient_accumulation_steps=1, use_cpu=True, **small)
    (logged,) = [row for row in trainer.state.log_history if "reward" in row]
    assert {"rewards/tags/mean", "rewards/layout/mean", "rewards/correct/mean"} <= logged.keys()
    assert (tmp_path / "adapter_config.json").is_file()


def run_notebook(name: str, model: str) -> dict:
    """The names that a notebook's cells leave, run one after the other with a tiny model."""
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    names = {"__name__": "notebook"}
    for text in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        exec(compile(text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", model), "cell", "exec"), names)
    return names


def test_the_notebook_runs_from_top_to_bottom(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(run_notebook("first_steps.ipynb", model)["rewards"]) == 4


@pytest.mark.slow
def test_the_notebook_on_a_reward_of_ones_own_runs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_notebook("grpo_own_reward.ipynb", model)
    assert names["checked"] == [(1.0, 0.2), (1.0, 0.0), (0.0, 0.2)]
    assert len(names["rewards"]) == names["STEPS"]
    assert 0 <= names["after"] <= 1.2


@pytest.mark.slow
def test_the_notebook_on_pairs_runs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_notebook("preference_pairs.ipynb", model)
    assert names["losses"][-1] < names["losses"][0]
    assert (tmp_path / "polite" / "adapter_config.json").is_file()


def test_every_notebook_is_tried():
    here = Path(__file__).read_text()
    assert not [path.name for path in EXAMPLES.rglob("*.ipynb") if f'"{path.name}"' not in here]


def test_the_number_after_the_last_mark_is_rewarded(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "three_numbers")
    problems = importlib.import_module("problems")
    texts = ["59 - 63 = -4\n-4 + 12 = 8\n#### 8", "#### 8 apples", "8", "#### 7\n#### 8", "#### 7"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert problems.correct(completions, ["8"] * 5) == [1.0, 0.0, 1.0, 1.0, 0.0]
