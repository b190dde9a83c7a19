"""Sizes of rollouts, and the order of prompts."""

import pytest

from upweight.rollout.plan import Plan, PromptOrder


@pytest.mark.parametrize(
    ("wanted", "size", "step", "groups", "steps"),
    [
        (32, 8, 32, 4, 1),
        (64, 8, 32, 8, 2),
        (4, 8, 4, 1, 2),  # a group larger than a step is trained on in several
        (6, 4, 6, 3, 2),
        (16, 8, 32, 4, 1),  # generation within an accumulation is generation for all of it
        (24, 8, 16, 6, 3),
    ],
)
def test_a_rollout_holds_whole_groups_and_whole_steps(wanted, size, step, groups, steps):
    plan = Plan.fitting(wanted, size, step, iterations=2)
    assert (plan.groups, plan.steps_per_pass, plan.steps_per_rollout) == (groups, steps, 2 * steps)


def test_an_epoch_has_the_steps_that_show_every_prompt_once():
    assert Plan(4, 8, 32).steps_per_epoch(10) == 3
    assert Plan(4, 8, 16, iterations=2).steps_per_epoch(10) == 10
    assert Plan(4, 8, 32).steps_per_epoch(1) == 1


@pytest.mark.parametrize("count", [1, 3, 4, 7, 20])
def test_every_epoch_has_every_row_once(count):
    order = PromptOrder(7, seed=3)
    taken = [row for _ in range(7) for row in order.take(count)]
    whole = len(taken) // 7 * 7
    epochs = [taken[start : start + 7] for start in range(0, whole, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(taken[whole:])) == len(taken[whole:])
    assert order.position == 7 * count


def test_an_order_goes_on_from_its_position():
    whole, later = PromptOrder(5, seed=1), PromptOrder(5, seed=1)
    taken = whole.take(13)
    later.position = 6
    assert later.take(7) == taken[6:]


def test_orders_differ_by_seed_and_epoch_and_may_be_left_alone():
    assert PromptOrder(30, seed=1).take(30) != PromptOrder(30, seed=2).take(30)
    order = PromptOrder(30, seed=1)
    assert order.take(30) != order.take(30)
    assert PromptOrder(3, seed=1, shuffle=False).take(5) == [0, 1, 2, 0, 1]
