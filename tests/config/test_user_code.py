"""Users' functions and methods in a config: found, checked, and named in errors; nothing of ours is lost."""

from pathlib import Path

import pytest
import torch

from upweight.config import parse_config
from upweight.config.schema import json_schema
from upweight.config.view import yaml_content
from upweight.errors import UserError
from upweight.types import Outputs

LOSSES = """
def loss(ratio, advantages, *, clip: float = 0.2):
    return -ratio.clamp(1 - clip, 1 + clip) * advantages

def center(rewards, groups):
    return rewards - rewards.mean()

def pairs(chosen_log_ratio, rejected_log_ratio, beta, tau: float = 1.0):
    return -beta * tau * (chosen_log_ratio - rejected_log_ratio)
"""
METHOD = """
from typing import ClassVar
from torch import Tensor
from upweight.methods.base import Method, pair_counts, required, sequence_sum
from upweight.settings import setting
from upweight.types import Batch, Loss, Outputs

class Hinge(Method):
    "A margin of log-probs."
    data: ClassVar = "pairs"
    learning_rate: ClassVar[float] = 3e-4
    margin: float = setting("hinge.margin", 1.0, "Least margin.", ge=0)

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return pair_counts(batch)

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        chosen_P, rejected_P = sequence_sum(required(out.logps_T), batch)[required(batch.pair_P2)].unbind(1)
        return Loss({"pairs": (self.margin - chosen_P + rejected_P).relu().sum()})

class Half(Method):
    data: ClassVar = "pairs"

class Odd(Hinge):
    data: ClassVar = "rows"

class Twice(Hinge):
    seed: int = setting("seed", 3, "Another seed.")

class Bare(Hinge):
    tau: float = 0.3

class Close(Hinge):
    def contribute(self, sample):
        return True

class Averages(Hinge):
    def loss(self, out, batch, prepared):
        return out.logps_T.mean()

class Keeps(Hinge):
    def loss(self, out, batch, prepared):
        return Loss({"pairs": out.logps_T})

class Fails(Hinge):
    def loss(self, out, batch, prepared):
        return Loss({"pairs": out.logp_T.sum()})

def function(logps):
    return logps
"""
PAIRS = {"base_model": "m", "datasets": [{"path": "x", "type": "chatml.intel"}]}
ONLINE = {"base_model": "m", "rl": "grpo", "datasets": [{"path": "x"}]}


@pytest.fixture
def folder(tmp_path):
    name = f"m{abs(hash(str(tmp_path))) % 10**9}"  # modules of users are kept by name
    (tmp_path / f"{name}_losses.py").write_text(LOSSES)
    (tmp_path / f"{name}_method.py").write_text(METHOD)
    return tmp_path, name


def parse(content, folder: Path):
    return parse_config(content, folder=folder)


def error_of(content, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        parse(content, folder)
    return str(error.value)


def grpo(loss, **keys):
    return {**ONLINE, "trl": {"reward_funcs": ["r.f"], "loss_type": loss, **keys.pop("trl", {})}, **keys}


def test_functions_of_a_config_are_loaded_from_its_folder_and_written_with_their_file(folder):
    path, name = folder
    keys = {"trl": {"advantage_estimator": f"{name}_losses.py:center"}, "method_args": {"clip": 0.3}}
    config = parse(grpo(f"{name}_losses.loss", **keys), path)
    assert config.method.calls["trl.loss_type"].options == {"clip": 0.3}
    assert config.method.advantage_function is not None
    assert yaml_content(config)["trl"]["loss_type"] == f"{path / name}_losses.py:loss"
    again = parse(yaml_content(config), Path("/"))
    assert again.method.calls.keys() == config.method.calls.keys()


def test_losses_of_pairs_mix_with_ours(folder):
    path, name = folder
    keys = {"dpo_loss_type": ["sigmoid", f"{name}_losses.pairs"], "dpo_loss_weights": [1, 0.5]}
    config = parse({**PAIRS, "rl": "dpo", **keys, "method_args": {"tau": 2}}, path)
    assert list(config.method.calls) == ["dpo_loss_type[1]"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (grpo("dappo"), "trl.loss_type: expected one of grpo, .* or the path of your function, .* mean 'dapo'?"),
        (grpo("{}_losses.los"), "trl.loss_type: .* has no function 'los'. Did you mean 'loss'?"),
        (grpo("{}_loses.loss"), "trl.loss_type: there is no '.*_loses': no .* Did you mean '.*_losses'?"),
        (grpo("{}_losses.loss", method_args={"clp": 1}), r"method_args\.clp: '.*loss' has no such .* mean 'clip'?"),
        (grpo("{}_losses.pairs"), "'.*_losses.pairs' asks for 'chosen_log_ratio', which is neither"),
        ({**PAIRS, "rl": "dpo", "method_args": {"a": 1}}, "method_args: has no effect unless dpo_loss_type"),
        ({**PAIRS, "rl": "{}_method.Half"}, "rl: '.*Half' has no count and no loss"),
        ({**PAIRS, "rl": "{}_method.Odd"}, "rl: '.*Odd' needs `data: .* pairs, .* got 'rows'"),
        ({**PAIRS, "rl": "{}_method.Twice"}, "rl: '.*Twice' declares the key 'seed', which every run has"),
        ({**PAIRS, "rl": "{}_method.Bare"}, "rl: '.*Bare' declares 'tau' without its key"),
        ({**PAIRS, "rl": "{}_method.Close"}, "defines 'contribute', which nothing calls. Did you mean 'contributes'?"),
        ({**PAIRS, "rl": "{}_method.function"}, "rl: '.*function' is no method but a function"),
        ({**PAIRS, "rl": "{}_method.Hing"}, "has no function 'Hing'. Did you mean 'Hinge'?"),
        ({**PAIRS, "rl": "gpro"}, "rl: expected one of .* or the path of your code, .* Did you mean 'grpo'?"),
        ({**PAIRS, "rl": "{}_method.Hinge", "hinge": {"margn": 1}}, r"hinge\.margn: unknown .* mean 'margin'?"),
        ({**PAIRS, "rl": "{}_method.Hinge", "hinge": {"margin": -1}}, r"hinge\.margin: must be at least 0, got -1"),
        ({**PAIRS, "rl": "{}_method.Hinge", "rl_beta": 1}, r"rl_beta: needs .*; this config has rl: .*_method\.Hinge"),
    ],
)
def test_what_does_not_fit_is_named_with_its_key(folder, content, message):
    path, name = folder
    filled = {
        key: value.format(name) if isinstance(value, str) else
        {k: v.format(name) if isinstance(v, str) else v for k, v in value.items()} if isinstance(value, dict) else value
        for key, value in content.items()
    }  # fmt: skip
    with pytest.raises(UserError, match=message):
        parse(filled, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Averages", r"rl: '.*Averages': loss returned a Tensor. Return Loss\(\{\"name\": sum\}, metrics\)"),
        ("Keeps", r"rl: '.*Keeps': the sum 'pairs' of loss is of shape \[3\]. Return Loss"),
        ("Fails", r"rl: '.*Fails' failed in loss: AttributeError: 'Outputs' .* \(m.*_method.py, line 47\)"),
    ],
)
def test_what_a_method_returns_or_raises_names_it(folder, kind, message):
    path, name = folder
    method = parse({**PAIRS, "rl": f"{name}_method.{kind}"}, path).method
    with pytest.raises(UserError, match=message):
        method.loss(Outputs(torch.zeros(3)), None, {})


def test_a_users_method_has_keys_schema_and_a_learning_rate(folder):
    path, name = folder
    config = parse({**PAIRS, "rl": f"{name}_method.Hinge", "hinge": {"margin": 2}}, path)
    assert config.method.model_dump() == {"margin": 2.0}
    assert config.optim.learning_rate == 3e-4
    assert config.method.name == f"{name}_method.Hinge"
    assert yaml_content(config)["rl"] == f"{path / name}_method.py:Hinge"
    assert parse(yaml_content(config), Path("/")).method == config.method
    assert "margin" in json_schema()["properties"]["hinge"]["properties"]


def test_a_users_method_is_a_stage(folder):
    path, name = folder
    stages = [{"name": "one"}, {"rl": f"{name}_method.Hinge", "hinge": {"margin": 2}}]
    config = parse({**PAIRS, "rl": "dpo", "stages": stages}, path)
    assert [stage.method.name for stage in config.stages] == ["dpo", f"{name}_method.Hinge"]
