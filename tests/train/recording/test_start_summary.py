"""What a run says before its first step."""

import pytest

from made_runs import metrics_of, upweight, write_config, write_model, write_online


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
    assert "2; 22 rows; warm-up: 1 step, at a learning rate of 0; " in said["steps"]
    assert "warning" not in done.stderr
    assert f"upweight watch {tmp_path / 'out'}" in said["look"]


@pytest.mark.parametrize("length", [{"max_steps": 3, "num_epochs": None}, {"num_epochs": 3}], ids=["steps", "epochs"])
def test_a_batch_larger_than_the_data_and_a_warm_up_that_is_most_of_the_run(tmp_path, length):
    keys = {"rows": 3, "micro_batch_size": 8, "gradient_accumulation_steps": 1, **length}
    file = write_config(tmp_path, write_model(tmp_path / "model"), warmup_steps=2, **keys)
    done = upweight("train", file)
    assert done.returncode == 0, done.stderr
    assert "3 pairs a step, all that there are (the config allows 8), about" in lines_of(done.stderr)["batch"]
    warning = "warm-up takes 2 of 3 steps: the learning rate rises from 0 and reaches its peak at step 3."
    assert done.stderr.count(f"{warning} Set 'warmup_steps: 0'") == 1


def test_a_run_of_one_step_trains_at_its_learning_rate(tmp_path):
    done = upweight("train", write_config(tmp_path, write_model(tmp_path / "model"), max_steps=1))
    assert "warm-up" not in lines_of(done.stderr)["steps"]
    (row,) = metrics_of(tmp_path / "out")
    assert row["learning_rate"] > 0


def test_an_online_run_says_what_it_samples(tmp_path):
    done = upweight("train", write_online(tmp_path, write_model(tmp_path / "model"), max_steps=1))
    assert done.returncode == 0, done.stderr
    assert "completions a step, up to" in lines_of(done.stderr)["batch"]


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_who_asks_for_less_is_told_nothing(option, tmp_path):
    done = upweight("train", write_config(tmp_path, write_model(tmp_path / "model"), max_steps=1), option)
    assert "batch" not in done.stderr
