"""Rollouts that are produced before they are needed."""

import threading
import time

import pytest

from made_rollouts import online_trainer, resumed_as_whole
from upweight.rollout.plan import Plan
from upweight.rollout.rollout import Rollout
from upweight.rollout.run_ahead import RunAhead, bounded_depth, lag_bound


def numbered():
    count = iter(range(100))
    return lambda state: Rollout(next(count), 0, [])


@pytest.mark.parametrize("threaded", [False, True])
def test_rollouts_come_in_the_order_they_were_asked_for(threaded):
    ahead = RunAhead(numbered(), threaded=threaded)
    for _ in range(3):
        ahead.submit(None)
    assert [ahead.take(None).number for _ in range(4)] == [0, 1, 2, 3]
    assert len(ahead) == 0
    ahead.close()


def test_a_thread_writes_while_others_work():
    began, may_end = threading.Event(), threading.Event()

    def produce(state):
        began.set()
        assert may_end.wait(10)
        return Rollout(7, 0, [])

    ahead = RunAhead(produce, threaded=True)
    ahead.submit(None)
    assert began.wait(10)  # the thread is in the midst of it while this one goes on
    may_end.set()
    assert ahead.take(None).number == 7
    ahead.close()


def test_each_side_is_told_how_long_it_waited_for_the_other():
    ahead = RunAhead(numbered(), threaded=False)
    ahead.submit(None)
    first = ahead.take(None).metrics
    assert "rollout/trainer_idle" not in first  # there is nothing to compare with yet
    assert first["rollout/queued_seconds"] >= 0
    then = ahead.take(None).metrics
    assert 0 <= then["rollout/trainer_idle"] <= 1
    assert 0 <= then["rollout/sampler_idle"] <= 1


def test_a_sampler_that_is_always_waited_for_does_not_idle():
    may_go = threading.Barrier(2)

    def produce(state):
        may_go.wait(10)
        time.sleep(0.05)
        return Rollout(0, 0, [])

    ahead = RunAhead(produce, threaded=True)
    found = []
    for _ in range(3):
        ahead.submit(None)
        may_go.wait(10)
        found.append(ahead.take(None).metrics)
    ahead.close()
    assert ahead.blocked > 0
    assert found[-1]["rollout/queued_seconds"] == 0
    assert found[-1]["rollout/sampler_idle"] < found[-1]["rollout/trainer_idle"]


def test_an_error_reaches_whoever_takes():
    def produce(state):
        raise ValueError("no rollout")

    ahead = RunAhead(produce, threaded=True)
    ahead.submit(None)
    with pytest.raises(ValueError, match="no rollout"):
        ahead.take(None)
    ahead.close()


def test_what_is_under_way_can_be_waited_for_and_kept():
    ahead, later = RunAhead(numbered(), threaded=True), RunAhead(numbered(), threaded=False)
    ahead.submit(None)
    ahead.submit(None)
    later.replace(ahead.wait())
    assert [later.take(None).number for _ in range(2)] == [0, 1]
    ahead.close()


def test_what_is_restored_takes_the_place_of_what_is_pending():
    may_end, made = threading.Event(), []

    def produce(state):
        assert may_end.wait(10)
        made.append(state)
        return Rollout(9, 0, [])

    ahead = RunAhead(produce, threaded=True)
    ahead.submit("running")
    ahead.submit("waiting")
    threading.Timer(0.1, may_end.set).start()
    ahead.replace([Rollout(4, 0, [])])
    assert made in ([], ["running"])  # whichever had begun has ended
    assert (len(ahead), ahead.take(None).number, len(ahead)) == (1, 4, 0)
    ahead.close()


def test_a_checkpoint_restored_twice_trains_no_step_twice(tmp_path):
    options = {"section": {"async_prefetch": True, "prefetch_depth": 2}, "max_steps": 6}
    whole = online_trainer(tmp_path, save_strategy="steps", save_steps=3, **options)
    whole.train()
    later = online_trainer(tmp_path, **options)
    numbers = []
    later.rollouts.on_rollout.append(lambda rollout, step: numbers.append(rollout.number))
    later.rollouts.restore(tmp_path / "checkpoint-3")  # and again by the trainer
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert numbers == [3, 4, 5]


def test_a_bound_on_staleness_lowers_the_depth():
    plan = Plan(4, 8, 16)  # two steps a rollout
    assert lag_bound(plan, 0, 1) == 1
    assert lag_bound(plan, 2, 3) == 7
    assert bounded_depth(plan, 3, 1, None) == 3
    assert bounded_depth(plan, 3, 1, 4) == 1
    assert bounded_depth(plan, 3, 1, 0) == 0


@pytest.mark.parametrize(
    ("depth", "wanted", "iterations"), [(1, 8, 1), (2, 8, 1), (1, 16, 1), (1, 16, 2), (3, 8, 2), (2, 24, 2)]
)
def test_lag_stays_within_its_bound_and_no_prompt_is_lost(tmp_path, depth, wanted, iterations):
    trainer = online_trainer(
        tmp_path, section={"async_prefetch": True, "prefetch_depth": depth}, wanted=wanted, iterations=iterations,
        max_steps=9, rows=7,
    )  # fmt: skip
    rollouts, seen, lags = trainer.rollouts, [], []
    rollouts.on_rollout.append(lambda rollout, step: seen.append((rollout.number, [g.number for g in rollout.groups])))
    next_step = rollouts.next_step

    def watched(runner, model, state):
        item = next_step(runner, model, state)
        lags.append(state.global_step - min(group.version for group in rollouts.current.groups))
        return item

    rollouts.next_step = watched
    trainer.train()
    plan = rollouts.producer.plan
    assert max(lags) <= lag_bound(plan, depth, 1)
    assert len(seen) < 2 or max(lags) > plan.steps_per_rollout - 1  # it was ahead
    assert [number for number, _ in seen] == list(range(len(seen)))
    order = [row for _, numbers in seen for row in numbers]
    for start in range(0, len(order) - 6, 7):
        assert sorted(order[start : start + 7]) == list(range(7))


def test_a_run_that_is_ahead_corrects_for_its_sampler_and_resumes(tmp_path):
    whole = resumed_as_whole(online_trainer, tmp_path, 5, 2, section={"async_prefetch": True})
    assert any("sampling/importance_sampling_ratio/mean" in row for row in whole.state.log_history)
