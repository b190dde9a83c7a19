"""Rewards that stay in the main process."""

import asyncio
import contextlib
import signal
import threading
import time

import pytest

from made_rewards import reward_call
from upweight.errors import UserError
from upweight.rewards.load import as_rewards
from upweight.rewards.scorer import Scorer

BOTH = (["a", "bb"], ["ccc", "x"])


def scorer_of(*functions, timeout=30.0) -> Scorer:
    return Scorer(as_rewards(list(functions)), timeout=timeout)


class Counting:
    """A reward with state, and no name."""

    def __init__(self):
        self.calls = []

    def __call__(self, completions, **kwargs):
        self.calls.append(list(completions))
        return [len(self.calls)] * len(completions)

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = list(state["calls"])


def test_objects_keep_their_state_and_see_calls_in_order():
    reward = Counting()
    with scorer_of(reward) as scorer:
        assert scorer.names == ["Counting"]
        futures = [scorer.submit(reward_call([str(number)])) for number in range(6)]
        assert [future.result().rewards_SR.item() for future in futures] == [1, 2, 3, 4, 5, 6]
        assert reward.calls == [[str(number)] for number in range(6)]
        kept = scorer.state()
    fresh = Counting()
    with scorer_of(fresh) as scorer:
        scorer.restore(kept)
        assert scorer.score(reward_call(["a"])).rewards_SR.item() == 7


def test_scoring_runs_them_in_the_calling_thread():
    def reward(completions):
        assert threading.current_thread() is threading.main_thread()
        return [None, 1.0]

    with scorer_of(reward) as scorer:
        scores = scorer.score(reward_call(["a", "b"]))
    assert scores.rewards_SR.isnan().tolist() == [[True], [False]]
    assert "rewards/reward/failed" not in scores.metrics
    assert scores.metrics["rewards/reward/seconds"] >= 0


def test_one_that_raises_is_tried_again_by_group():
    def reward(completions):
        return [1.0 / (text != "x") for text in completions]

    with scorer_of(reward) as scorer:
        scores = scorer.score(reward_call(*BOTH))
    assert scores.rewards_SR.isnan().tolist() == [[False], [False], [True], [True]]
    assert scores.metrics["rewards/reward/failed"] == 2


@pytest.mark.parametrize("way", ["score", "submit"])
def test_one_that_hangs_stops_the_run(way):
    over = threading.Event()

    def reward(completions):
        while not over.is_set():
            with contextlib.suppress(Exception):
                time.sleep(0.05)

    with scorer_of(reward, timeout=0.2) as scorer:
        call = reward_call(["a", "b"])
        with pytest.raises(UserError, match=r"failed on all 2 completions: it took longer than 0.2 seconds"):
            scorer.score(call) if way == "score" else scorer.submit(call).result(timeout=20)
    over.set()


def test_an_object_that_is_stuck_is_not_called_again():
    over, calls = threading.Event(), []

    def reward(completions):
        calls.append(completions)
        over.wait(100)
        return [1.0] * len(completions)

    with scorer_of(reward, timeout=0.2) as scorer:
        for said in ("longer than 0.2 seconds", "an earlier call has not returned"):
            with pytest.raises(UserError, match=said):
                scorer.submit(reward_call(*BOTH)).result(timeout=20)
        assert len(calls) == 1
        over.set()


def test_a_coroutine_that_blocks_the_loop_stops_the_run(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr("upweight.rewards.local.GRACE_SECONDS", 0.1)

    async def reward(completions):
        over.wait(100)
        return [1.0] * len(completions)

    with scorer_of(reward, timeout=0.2) as scorer:
        with pytest.raises(UserError, match="without awaiting anything"):
            scorer.score(reward_call(*BOTH))
        over.set()


def test_an_alarm_of_others_is_kept():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    left = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with scorer_of(lambda completions: [1.0]) as scorer:
            scorer.score(reward_call(["a"]))
        for _ in range(200):
            if rung:
                break
            time.sleep(0.02)
        assert rung
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


def test_async_functions_run_together():
    met = {}

    async def first(completions, **kwargs):
        met["first"] = asyncio.Event()
        while "second" not in met:
            await asyncio.sleep(0.01)
        met["second"].set()
        await met["first"].wait()
        return [1.0] * len(completions)

    async def second(completions, log_metric):
        met["second"] = asyncio.Event()
        await met["second"].wait()
        met["first"].set()
        log_metric("spoken", 2)
        return [2.0] * len(completions)

    with scorer_of(first, second) as scorer:
        scores = scorer.score(reward_call(*BOTH))
    assert scores.rewards_SR.tolist() == [[1.0, 2.0]] * 4
    assert scores.metrics["spoken"] == 2


def test_async_failures_follow_the_same_rules():
    async def raising(completions):
        if "x" in completions:
            raise KeyError("x")
        return [1.0] * len(completions)

    async def hanging(completions):
        await asyncio.sleep(1000)

    async def short(completions):
        return [1.0]

    with scorer_of(raising) as scorer:
        assert scorer.score(reward_call(*BOTH)).rewards_SR.isnan().tolist() == [[False], [False], [True], [True]]
    with scorer_of(hanging, timeout=0.2) as scorer, pytest.raises(UserError, match=r"longer than 0\.2 seconds"):
        scorer.score(reward_call(*BOTH))
    with scorer_of(short) as scorer, pytest.raises(UserError, match="reward 'short' must return a list of 4 numbers"):
        scorer.score(reward_call(*BOTH))


def test_a_client_bound_to_the_loop_serves_later_calls():
    loops = set()

    async def reward(completions):
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(completions)

    with scorer_of(reward) as scorer:
        for _ in range(3):
            scorer.score(reward_call(["a"]))
    assert len(loops) == 1


def test_an_alarm_in_a_thread_is_explained():
    def reward(completions):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    with scorer_of(reward) as scorer, pytest.raises(UserError, match="put the function into a separate file"):
        scorer.submit(reward_call(["a"])).result(timeout=20)
