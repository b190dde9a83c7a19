"""The order of rows: the same on every rank, another in every epoch, known ahead."""

from itertools import chain

from made_runs import OFFLINE, rows_for
from upweight.train.loader import StepBatchSampler, step_loader


def test_steps_cover_every_row_once_and_epochs_differ():
    sampler = StepBatchSampler(10, 4, 3, shuffle=True)
    first = list(sampler)
    second = list(StepBatchSampler(10, 4, 3, shuffle=True, steps_done=lambda: 4))
    assert [len(step) for step in first] == [4, 4, 2]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert list(StepBatchSampler(10, 4, 3, shuffle=True)) == first
    assert list(StepBatchSampler(10, 4, 4, shuffle=True)) != first


def test_the_rows_of_any_step_are_known_without_going_through_the_others():
    steps = []
    sampler = StepBatchSampler(10, 4, 3, shuffle=True, steps_done=lambda: len(steps))
    for _ in range(3):
        steps += list(sampler)
    assert [sampler.rows_of(step) for step in range(9)] == steps


def test_order_and_the_last_batch_can_be_kept_or_dropped():
    assert list(StepBatchSampler(5, 2, 0, shuffle=False)) == [[0, 1], [2, 3], [4]]
    assert list(StepBatchSampler(5, 2, 0, shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]
    assert len(StepBatchSampler(5, 2, 0, shuffle=False, drop_last=True)) == 2


def test_loader_processes_give_what_this_process_gives():
    method = OFFLINE["kto"]
    rows = rows_for(method, 5)
    alone, helped = (
        list(step_loader(rows, method, StepBatchSampler(5, 3, 0, shuffle=True), num_workers=n)) for n in (0, 1)
    )  # fmt: skip
    assert [[s.ids.tolist() for u in item["units"] for s in u.samples] for item in alone] == [
        [s.ids.tolist() for u in item["units"] for s in u.samples] for item in helped
    ]
