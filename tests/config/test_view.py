"""What a transform receives as `cfg`."""

from pathlib import Path

import pytest

from upweight.config import parse_config, view

CFG = view(
    parse_config(
        {"base_model": "m", "rl": "grpo", "sequence_len": 77, "datasets": [{"path": "d"}],
         "trl": {"beta": 0.5, "reward_funcs": ["r.f"]}},
        folder=Path(),
    )
)  # fmt: skip


def test_attributes_items_and_get_answer_by_yaml_name():
    assert CFG.sequence_len == CFG["sequence_len"] == CFG.get("sequence_len") == 77
    assert CFG.trl.beta == CFG["trl"]["beta"] == CFG.trl.get("beta") == 0.5
    assert CFG.rl == "grpo"
    assert CFG.datasets[0].path == CFG["datasets"][0]["path"] == "d"


def test_unset_keys_are_none_or_their_default():
    assert CFG.max_steps is None
    assert CFG.get("max_steps", 3) == 3
    assert CFG.seed == 42
    assert CFG.get("no_such_key", "x") == "x"


def test_unknown_names_are_not_guessed():
    with pytest.raises(AttributeError, match="no key 'sequence_length'"):
        _ = CFG.sequence_length
    with pytest.raises(KeyError):
        _ = CFG["sequence_length"]
