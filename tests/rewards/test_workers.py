"""Rewards in worker processes, good ones and every bad kind."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from made_rewards import file_scorer, reward_call
from upweight.errors import UserError

BOTH = (["a", "bb"], ["ccc", "x"])


def scored(folder: Path, code: str, **options):
    with file_scorer(folder, code, "reward", **options) as scorer:
        return scorer.score(reward_call(*BOTH))


def is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(number: int) -> bool:
    for _ in range(500):
        if not is_alive(number):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shares_are_whole_groups_and_order_is_kept(tmp_path, workers):
    code = """
import os
def reward(completions, prompts, level, log_extra, **kwargs):
    log_extra("called_with", [len(completions)] * len(completions))
    log_extra("process", [os.getpid()] * len(completions))
    return [len(text) + 10 * at for text, at in zip(completions, level)]
"""
    with file_scorer(tmp_path, code, "reward", workers=workers) as scorer:
        scores = scorer.score(reward_call(*BOTH, level=[1, 2, 3, 4]))
    assert scores.rewards_SR.dtype == torch.float32
    assert scores.rewards_SR.tolist() == [[11.0], [22.0], [33.0], [41.0]]
    assert scores.extras["called_with"] == [4 if workers == 1 else 2] * 4
    assert os.getpid() not in scores.extras["process"]


def test_a_worker_is_light_and_calls_in_its_main_thread(tmp_path):
    code = """
import signal, sys, threading
def reward(completions):
    assert threading.current_thread() is threading.main_thread()
    signal.alarm(20)
    signal.alarm(0)
    assert not {"torch", "transformers", "numpy", "pydantic"} & set(sys.modules)
    return [1.0] * len(completions)
"""
    assert scored(tmp_path, code).rewards_SR.tolist() == [[1.0]] * 4


def test_one_process_serves_many_calls_and_imports_like_the_main_process(tmp_path):
    (tmp_path / "beside_reward.py").write_text("BONUS = 7\n")
    code = """
import beside_reward
calls = 0
def reward(completions, trainer_state=None):
    global calls
    calls += 1
    return [calls + beside_reward.BONUS] * len(completions)
"""
    with file_scorer(tmp_path, code, "reward") as scorer:
        futures = [scorer.submit(reward_call(["a"])) for _ in range(5)]
        assert [future.result().rewards_SR.item() for future in futures] == [8.0, 9.0, 10.0, 11.0, 12.0]


def test_several_calls_under_way_keep_their_results_apart(tmp_path):
    code = """
import time
def reward(completions):
    time.sleep(0.1 if completions[0].startswith("slow") else 0.0)
    return [len(text) for text in completions]
def other(completions):
    return [-len(text) for text in completions]
"""
    texts = ["slow" * 3, "q", "slow", "qu", "slo", "quick"]
    with file_scorer(tmp_path, code, "reward", "other", workers=2) as scorer:
        futures = [scorer.submit(reward_call([text])) for text in texts]
        found = [future.result().rewards_SR.tolist() for future in futures]
    assert found == [[[float(len(text)), -float(len(text))]] for text in texts]


def test_one_bad_completion_costs_its_group_alone(tmp_path, caplog):
    code = """
def reward(completions):
    scores = []
    for text in completions:
        if text == "x":
            raise ValueError("cannot read x")
        scores.append(1.0)
    return scores
"""
    scores = scored(tmp_path, code)
    assert scores.rewards_SR.isnan().tolist() == [[False], [False], [True], [True]]
    assert scores.metrics["rewards/reward/failed"] == 2
    warnings = [record.getMessage() for record in caplog.records if "warning:" in record.getMessage()]
    assert len(warnings) == 1
    assert "reward 'reward' failed on 2 of 4 completions: ValueError: cannot read x (rewards_" in warnings[0]
    assert "line 6)" in warnings[0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no')", r"ValueError: no \(rewards_.*line 3\)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(3)", "its worker process ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", r"killed by SIGSEGV \(rewards_.*line 3\)"),
        ("return [float('nan')] * len(completions)", "return None where a reward does not apply"),
        ("return [float('inf')] * len(completions)", "NaN, infinity"),
    ],
)
def test_a_reward_that_fails_on_everything_stops_the_run(tmp_path, body, said):
    with pytest.raises(UserError, match=f"reward 'reward' failed on all 4 completions: .*{said}"):
        scored(tmp_path, f"\ndef reward(completions):\n    {body}\n")


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(0); time.sleep(1000)",
        "import ctypes; ctypes.PyDLL(None).sleep(1000)",  # holds the interpreter's lock
    ],
)
def test_a_reward_that_hangs_is_ended(tmp_path, body):
    said = r"failed on all 2 completions: it took longer than 0.5 seconds \(rewards_.*line 3\).*trl.reward_timeout"
    code = f"\ndef reward(completions):\n    {body}\n"
    with file_scorer(tmp_path, code, "reward", timeout=0.5) as scorer, pytest.raises(UserError, match=said):
        scorer.score(reward_call(["a", "b"]))


def test_the_limit_that_is_told_of_is_the_one_that_was_set(tmp_path):
    code = "\nimport time\ndef reward(completions):\n    time.sleep(1000)\n"
    with (
        file_scorer(tmp_path, code, "reward", timeout=0.5) as scorer,
        pytest.raises(UserError, match=r"failed on all 2 completions: it took longer than 0.5 seconds"),
    ):
        scorer.score(reward_call(["a"], ["b"]))


def test_a_module_that_is_slow_to_import_has_the_time_of_a_call(tmp_path, monkeypatch):
    monkeypatch.setattr("upweight.rewards.workers.START_SECONDS", 0.5)
    code = "import time\ntime.sleep(1)\ndef reward(completions):\n    return [1.0] * len(completions)\n"
    assert scored(tmp_path, code, timeout=30.0).rewards_SR.tolist() == [[1.0]] * 4


def test_a_completion_that_hangs_costs_its_group_alone(tmp_path):
    code = """
import time
def reward(completions):
    if "x" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)
"""
    scores = scored(tmp_path, code, timeout=2.0)
    assert scores.rewards_SR.isnan().tolist() == [[False], [False], [True], [True]]


def test_a_killed_worker_is_replaced(tmp_path):
    code = """
import os
def reward(completions):
    return [os.getpid()] * len(completions)
"""
    with file_scorer(tmp_path, code, "reward") as scorer:
        first = int(scorer.score(reward_call(["a"])).rewards_SR.item())
        os.kill(first, 9)
        second = int(scorer.score(reward_call(["a"])).rewards_SR.item())
    assert second != first
    assert wait_until_gone(second)


@pytest.mark.parametrize(
    "body",
    [
        "print('x' * 300_000)",
        "import os; os.write(1, b'y' * 300_000)",
        "import os, sys; sys.stdin.close(); os.closerange(0, 2)",
        "import sys; sys.stdout.close()",
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)]",
        "import signal; signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.setitimer(signal.ITIMER_REAL, 0.2)",
        "import os; os.fork()",
        "import os; os.fork() or 1 / 0",
        "import os; os.fork() or os._exit(1)",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join()",
        "import os; os.chdir('/')",
        "import os; os.system('sleep 1000 &')",
    ],
)
def test_strange_behaviour_breaks_nothing(tmp_path, body):
    code = f"def reward(completions):\n    {body}\n    return [len(text) for text in completions]\n"
    with file_scorer(tmp_path, code, "reward") as scorer:
        for _ in range(3):
            assert scorer.score(reward_call(*BOTH)).rewards_SR.tolist() == [[1.0], [2.0], [3.0], [1.0]]


@pytest.mark.parametrize("content", ["b'x' * 300_000", "bytes(20)", "b'12'", "b'\\n'"])
def test_writing_to_inherited_descriptors_breaks_nothing(tmp_path, content):
    code = f"""
import contextlib, os
def reward(completions):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, {content})
    return [len(text) for text in completions]
"""
    with file_scorer(tmp_path, code, "reward") as scorer:
        for _ in range(3):
            assert scorer.score(reward_call(*BOTH)).rewards_SR.tolist() == [[1.0], [2.0], [3.0], [1.0]]


def test_children_that_a_reward_leaves_end_with_it(tmp_path):
    code = """
import os, subprocess, time
def reward(completions):
    child = subprocess.Popen(["sleep", "1000"])
    forked = os.fork()
    if not forked:
        time.sleep(1000)
    return [child.pid, forked]
"""
    with file_scorer(tmp_path, code, "reward") as scorer:
        children = [int(number) for (number,) in scorer.score(reward_call(["a", "b"])).rewards_SR.tolist()]
        assert all(is_alive(number) for number in children)
    assert all(wait_until_gone(number) for number in children)


def test_workers_end_when_the_main_process_is_killed(tmp_path):
    file = tmp_path / "hanging_rewards.py"
    file.write_text("import os, time\ndef reward():\n    print(os.getpid(), flush=True)\n    time.sleep(1000)\n")
    script = (
        "import pickle; from upweight.rewards.workers import Worker; "
        f"Worker(0).call(('hanging_rewards', 'reward', {str(file)!r}), pickle.dumps(({{}}, (), 'reward', 1)), 500.0)"
    )
    main = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert main.stderr is not None
    worker = int(main.stderr.readline())
    main.kill()
    main.wait()
    assert wait_until_gone(worker)
    main.stderr.close()


def test_wrong_answers_stop_the_run(tmp_path):
    with pytest.raises(UserError, match=r"reward 'reward' must return a list of 4 numbers.*but returned 3"):
        scored(tmp_path, "def reward(completions):\n    return [1.0] * (len(completions) - 1)\n")


def test_columns_that_cannot_travel_are_named(tmp_path):
    code = "def reward(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    with file_scorer(tmp_path, code, "reward") as scorer, pytest.raises(UserError, match="and handle cannot be sent"):
        scorer.score(reward_call(["a"], handle=[lambda: None], answer=["1"]))


def test_closing_cancels_what_waits(tmp_path):
    code = "import time\ndef reward(completions):\n    time.sleep(1000)\n"
    scorer = file_scorer(tmp_path, code, "reward", timeout=500)
    futures = [scorer.submit(reward_call(["a"])) for _ in range(3)]
    scorer.close()
    scorer.close()
    for future in futures:
        assert future.exception(timeout=20) is not None or future.cancelled()


def test_a_fork_of_the_main_process_leaves_the_workers_alone(tmp_path):
    code = "import os\ndef reward(completions):\n    return [os.getpid()]\n"
    with file_scorer(tmp_path, code, "reward") as scorer:
        worker = scorer.score(reward_call(["a"])).rewards_SR.item()
        child = os.fork()
        if not child:
            scorer.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert scorer.score(reward_call(["a"])).rewards_SR.item() == worker


def test_a_stopped_worker_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("upweight.rewards.workers.GRACE_SECONDS", 0.2)
    code = """
import os, signal
def reward(completions):
    if "x" in completions:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [1.0] * len(completions)
"""
    scores = scored(tmp_path, code, timeout=1.0)
    assert scores.rewards_SR.isnan().tolist() == [[False], [False], [True], [True]]


def test_a_scorer_that_is_dropped_ends_its_workers(tmp_path):
    scorer = file_scorer(tmp_path, "import os\ndef reward(completions):\n    return [os.getpid()]\n", "reward")
    worker = int(scorer.submit(reward_call(["a"])).result().rewards_SR.item())
    del scorer
    gc.collect()
    assert wait_until_gone(worker)
