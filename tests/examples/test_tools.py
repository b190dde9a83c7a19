"""The example of tools: its config, its functions and its rows fit together."""

import json
from pathlib import Path

import torch

from upweight.config import load_config
from upweight.train.online.assemble import build_rewards
from upweight.train.online.environments import environment_setup

FOLDER = Path(__file__).parents[2] / "examples" / "tools"


def test_tools_and_reward_of_the_example_fit_its_rows(monkeypatch):
    monkeypatch.chdir(FOLDER)
    config = load_config(FOLDER / "config.yaml")
    rows = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text().splitlines()]
    env_setup = environment_setup(config)
    assert env_setup is not None
    assert env_setup.limits.max_turns == 4
    (reward,) = build_rewards(config, torch.device("cpu"), list(rows[0]), env_setup)
    tool = env_setup.environment.tools["in_stock"]
    for row in rows:
        item = row["prompt"][1]["content"].split("'")[1]
        said = [{"role": "assistant", "content": f"We have {tool(item)}."}]
        assert reward.function(completions=[said], answer=[row["answer"]]) == [1.0]
