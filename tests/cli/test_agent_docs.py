"""Pages for coding agents: short, and what they name exists."""

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from upweight.cli.agent_docs import FOLDER, TOPICS
from upweight.cli.app import app
from upweight.config import parse_config
from upweight.config.config import blocks, general_keys, method_keys
from upweight.config.sections.data import DatasetSpec
from upweight.errors import UserError


def page(topic):
    return (FOLDER / f"{topic}.md").read_text(encoding="utf-8")


def test_topics_are_listed_and_printed():
    shown = CliRunner().invoke(app, ["agent-docs"]).stdout
    assert TOPICS == ["ebft", "grpo", "preference", "reward-modelling", "sft"]
    assert [line.split()[2] for line in shown.splitlines()] == TOPICS
    assert CliRunner().invoke(app, ["agent-docs", "sft"]).stdout == page("sft")
    assert isinstance(CliRunner().invoke(app, ["agent-docs", "gpro"]).exception, UserError)


@pytest.mark.parametrize("topic", TOPICS)
def test_configs_are_valid_and_keys_and_commands_exist(topic):
    text = page(topic)
    assert text.count("\n") <= 90
    configs = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert configs
    for content in configs:
        parse_config(content, folder=Path())
    known = {*general_keys(), *method_keys()}
    starts = ("rl_", "lora_", "dpo_", "orpo_", "simpo_", "kto_", "gradient_", *(f"{block}." for block in blocks()))
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)(?::[^`]*)?`", text)
    assert {key for key in named if key.startswith(starts)} <= known
    for key in re.findall(r"`((?:step|field)_[a-z_]+)`", text):
        assert key in DatasetSpec.model_fields or key.endswith("scores")
    commands = vars(get_command(app))["commands"]
    assert set(re.findall(r"\bupweight ([a-z][a-z-]+)", text)) <= set(commands)
