"""What a run says before its first step."""

import pytest

from made_runs import upweight, write_config, write_model, write_online


def lines_of(stderr):
    return {line.split()[0]: line for line in stderr.splitlines() if line.strip()}


def test_an_offline_run_says_what_it_is(tmp_path):
    done = upweight("train", write_config(tmp_path, write_model(tmp_path / "model"), adapter="lora", lora_r=4,
                                          lora_target_linear=True, max_steps=2))  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stderr)
    assert "dpo (lora, rank 4): trains" in said["model"]
    assert "4 pairs a step, about" in said["batch"]
    assert "CPU" in said["device"]
    assert "GiB" in said["memory"]
    assert "2; 22 rows" in said["steps"]
    assert f"upweight watch {tmp_path / 'out'}" in said["look"]


def test_an_online_run_says_what_it_samples(tmp_path):
    done = upweight("train", write_online(tmp_path, write_model(tmp_path / "model"), max_steps=1))
    assert done.returncode == 0, done.stderr
    assert "completions a step, up to" in lines_of(done.stderr)["batch"]


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_who_asks_for_less_is_told_nothing(option, tmp_path):
    done = upweight("train", write_config(tmp_path, write_model(tmp_path / "model"), max_steps=1), option)
    assert "batch" not in done.stderr
