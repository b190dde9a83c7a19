"""Examples of users' own code: short files that train from YAML, and say what their papers' formulas say."""

import importlib
import json
from pathlib import Path

import pytest
from transformers import AutoModelForTokenClassification

from made_examples import EXAMPLES, example_model, trained
from made_runs import metrics_of
from made_tokenizers import byte_tokenizer
from tiny_models import tiny

FOLDER = EXAMPLES / "own_code"
CONFIGS = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return example_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def process_model(tmp_path_factory):
    """The folder of a tiny process reward model."""
    folder, tokenizer = tmp_path_factory.mktemp("process"), byte_tokenizer("chatml")
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    tiny("llama", auto=AutoModelForTokenClassification, num_labels=2, **size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def load(monkeypatch):
    """Imports a file of the folder."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_each_file_is_short():
    assert all(len(file.read_text().splitlines()) < 60 for file in FOLDER.iterdir() if file.is_file())


@pytest.mark.parametrize("example", CONFIGS, ids=lambda path: path.stem)
def test_an_example_trains(example, model, process_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PROCESS_REWARD_MODEL", process_model)
    run = Path(trained(example, tmp_path, model, ""))
    (row,) = [row for row in metrics_of(run) if "loss" in row]
    if example.stem == "guessing":  # a tiny model writes no numbers
        assert {"rewards/found/mean", "rewards/near/mean", "environment/turns_mean"} <= row.keys()
    else:
        assert row["grad_norm"] > 0
    if example.stem == "process_credit":
        rows = [json.loads(line) for line in (run / "completions" / "step_00001.jsonl").read_text().splitlines()]
        assert any(row["reward_parts"]["step_gains"] for row in rows)
        assert all(len(row["token_advantages"]) == row["tokens"] for row in rows)


def test_gains_add_up_to_the_last_score(load, process_model, monkeypatch):
    monkeypatch.setenv("PROCESS_REWARD_MODEL", process_model)
    module = importlib.reload(load("process_credit"))
    reward, text = module.StepGains(), "one\ntwo\n\nthree"
    (first, nothing) = reward(["p", "p"], [text, [{"role": "assistant", "content": " \n"}]])
    scores = reward.model([{"prompt": "p", "completion": text}])[0]
    ends, gains = zip(*first["characters"], strict=True)
    assert ends == (3, 7, 14)
    assert gains[0] == pytest.approx(scores[0] - 0.5)
    assert sum(gains) == pytest.approx(scores[-1] - 0.5)
    assert nothing == {"characters": []}


def test_the_game_pays_for_few_and_near_guesses(load):
    game = load("guessing").Guess()
    game.reset("40")
    assert game.get_reward() == {"found": 0.0, "near": 1 / 301}
    assert game.step("is it 30?") == ("Higher.", False)
    assert game.step("no idea") == "That is no number."
    assert game.get_reward()["near"] == 1 / 11
    assert game.step("40") == ("Right.", True)
    assert game.get_reward() == {"found": 0.5, "near": 1.0}
