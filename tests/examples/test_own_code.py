"""Examples of users' own code: short files that train from YAML, and say what their papers' formulas say."""

import importlib
import json
from math import exp, log
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from made_batches import flat, made_batch, made_outputs, total_loss
from made_examples import EXAMPLES, example_model, trained
from made_runs import metrics_of
from made_tokenizers import byte_tokenizer
from slow_cases import slow_except
from tiny_models import tiny
from upweight.doctor.method_check.checks import check
from upweight.doctor.method_check.targets import methods_of
from upweight.methods import GRPO

FOLDER = EXAMPLES / "own_code"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
LOSSES = ("reinforce_plus_plus", "length_debiased", "dpo_positive", "kto_logistic")


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


def test_advantages_are_centred_by_group_and_scaled_by_the_rollout(load):
    rewards = torch.tensor([1.0, 3.0, 0.0, torch.nan, 6.0])
    got = load("reinforce_plus_plus").advantages(rewards, torch.tensor([0, 0, 1, 1, 1]), floor=0.0)
    centred = torch.tensor([-1.0, 1.0, -3.0, 3.0])
    assert got[[0, 1, 2, 4]].tolist() == pytest.approx((centred / centred.std()).tolist())
    assert got[3] == 0


@pytest.mark.parametrize("settings", [{}, {"epsilon": 0.05}])
def test_the_length_debiased_loss_is_dr_grpo(load, settings):
    function, lengths, random = load("length_debiased").loss, [3, 1, 5], torch.Generator().manual_seed(0)
    logps = [(-torch.rand(length, generator=random)).tolist() for length in lengths]
    known = {"advantage_S": [1.5, -2.0, 0.5], "old_logps_T": flat(logps) + 0.3 * torch.randn(9, generator=random)}
    size = {"max_completion_length": 8, **settings}
    ours = total_loss(GRPO(loss_type=function, **size), made_outputs(logps), made_batch(lengths, **known))
    right = total_loss(GRPO(loss_type="dr_grpo", **size), made_outputs(logps), made_batch(lengths, **known))
    assert ours == pytest.approx(right)


def test_a_chosen_answer_that_loses_is_penalised(load):
    ratios = torch.tensor([0.5, -0.5]), torch.tensor([-1.0, -2.0])
    got = load("dpo_positive").loss(*ratios, beta=0.1, penalty=5.0).tolist()
    assert got == pytest.approx([log(1 + exp(-0.15)), log(1 + exp(-0.1 * (1.5 - 5 * 0.5)))])


def test_labels_turn_the_logistic_loss_around(load):
    got = load("kto_logistic").loss(torch.tensor([2.0, 2.0]), torch.tensor([True, False]), torch.tensor(0.5), 0.2)
    assert got.tolist() == pytest.approx([log(1 + exp(-0.3)), log(1 + exp(0.3))])


@pytest.mark.parametrize("name", slow_except(["kto_logistic"], LOSSES))
def test_what_training_relies_on_holds(name, monkeypatch):
    monkeypatch.chdir(FOLDER)
    (method,) = methods_of(f"{name}.py", {}, None, FOLDER).values()
    assert [finding.name for finding in check(method) if finding.problem is not None] == []


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
