"""What is written to a run folder holds no credentials."""

import json

import pytest

from made_runs import write_online
from upweight.config import load_config
from upweight.config.redact import redacted
from upweight.train.recording.model_card import model_card
from upweight.train.recording.run_folder import changed_keys, write_config


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://ann:pw@host:80/v1", "https://***@host:80/v1"),
        ("s3://bucket/rows?X-Amz-Signature=abc&part=2", "s3://bucket/rows?***&part=2"),
        ("https://host/?part=2&access_token=abc#top", "https://host/?part=2&***#top"),
        ("Bearer hf_abcdefghijklmnopqrst", "Bearer ***"),
        ({"api_key": "x", "on": [{"Authorization": "y"}]}, {"api_key": "***", "on": [{"Authorization": "***"}]}),
        ({"token": "abc", "eos_token": "</s>", "tokens": 3}, {"token": "***", "eos_token": "</s>", "tokens": 3}),
        ("mail ann@host", "mail ann@host"),
        ("user/model@main", "user/model@main"),
    ],
)
def test_credentials_are_hidden_and_nothing_else(value, shown):
    assert redacted(value) == shown


def test_config_and_card_of_a_run_name_servers_without_their_passwords(model_folder, tmp_path):
    url = "http://ann:hunter2@127.0.0.1:1"
    trl = {"num_generations": 4, "max_completion_length": 6, "reward_funcs": ["rewards.f"]}
    trl |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    config = load_config(write_online(tmp_path, model_folder, trl=trl, mlflow_tracking_uri=url, use_mlflow=True))
    write_config(config, tmp_path / "out")
    written = (tmp_path / "out" / "config.yaml").read_text() + model_card(config, [], 1)
    assert "hunter2" not in written
    assert "***@127.0.0.1:1" in written
    assert changed_keys(config, tmp_path / "out") == {}
    assert json.dumps(config.set_keys).count("hunter2") == 2  # the run itself still has them
