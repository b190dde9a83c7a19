"""Silence is reported with what goes on, at growing intervals, and not while there is progress."""

import threading
import time

import pytest

from made_runs import upweight, write_online
from upweight.config import load_config
from upweight.heartbeat import VARIABLE, activity, heartbeat, progressed
from upweight.train.run import train

SLEEPS = """
import time
def sleeps(completions):
    time.sleep(2)
    return [float(len(text)) for text in completions]
"""


def test_a_long_silence_is_reported_a_few_times_with_its_reason(caplog):
    with heartbeat(0.2), activity("waiting for rollouts"), activity("sampling 8 completions"):
        time.sleep(1.1)
    lines = [record.message for record in caplog.records]
    assert lines
    assert len(lines) <= 3
    assert all(line.startswith("no progress for ") for line in lines)
    assert all(line.endswith(" s: waiting for rollouts; sampling 8 completions") for line in lines)


def test_progress_keeps_it_quiet(caplog):
    with heartbeat(1.5), activity("a step"):
        for _ in range(40):
            time.sleep(0.05)
            progressed()
    assert not caplog.records


def test_a_second_one_says_nothing_of_its_own(caplog):
    with heartbeat(0.2), heartbeat(0.2), activity("a step"):
        time.sleep(0.3)
        assert sum(thread.name == "heartbeat" for thread in threading.enumerate()) == 1
    assert caplog.records


def no_thread(_):
    """As `Thread.start` where the machine gives no more threads."""
    raise RuntimeError("can't start new thread")


def test_one_that_could_not_begin_leaves_the_next_alone(caplog, monkeypatch):
    monkeypatch.setenv(VARIABLE, "soon")
    with pytest.raises(ValueError, match="soon"), heartbeat():
        pass
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"), heartbeat(0.2):
            pass
    with heartbeat(0.2), activity("a step"):
        time.sleep(0.3)
    assert caplog.records


def test_without_an_activity_there_is_nothing_to_say(caplog):
    with heartbeat(0.1):
        time.sleep(0.4)
    assert not caplog.records


def with_a_slow_reward(folder, model):
    """A config of one step, whose reward takes two seconds, in a worker process."""
    (folder / "slow_rewards.py").write_text(SLEEPS)
    return write_online(folder, model, rewards=["slow_rewards.sleeps"], max_steps=1)


def test_a_command_that_is_quiet_says_what_it_waits_for(model_folder, tmp_path):
    done = upweight("train", with_a_slow_reward(tmp_path, model_folder), "--quiet", **{VARIABLE: 0.5})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "no progress for" in line]
    assert any("waiting for a rollout; scoring by sleeps (trl.reward_timeout: 120 s a call)" in line for line in lines)


def test_a_run_that_is_started_from_python_says_what_it_waits_for(model_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "0.5")
    train(load_config(with_a_slow_reward(tmp_path, model_folder)))
    lines = [record.message for record in caplog.records if record.message.startswith("no progress for")]
    assert any(f"training into {tmp_path / 'out'}; waiting for a rollout; scoring by sleeps" in line for line in lines)
