"""Trained models that commands are given."""

import json

import pytest

from upweight.cli.inputs import find_trained
from upweight.errors import UserError
from upweight.runs.checkpoints import mark_whole


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("of_run", [True, False])
def test_a_damaged_checkpoint_is_refused_before_it_is_read(name, of_run, tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / name).write_text(json.dumps({"base_model_name_or_path": "m"}))
    mark_whole(checkpoint)
    if of_run:
        (tmp_path / "config.yaml").write_text("base_model: m\ndatasets: [{path: d, type: alpaca}]\n")
    assert (find_trained(str(checkpoint), []).adapter is None) == (name == "config.json")
    (checkpoint / name).write_bytes(b"\0" * 32)
    with pytest.raises(UserError, match=rf"checkpoint-5 is damaged: {name} "):
        find_trained(str(checkpoint), [])
