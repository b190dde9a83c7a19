"""Whatever the batch, every prompt is written for and trained on exactly once an epoch, over all ranks together."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upweight.engine.packing import plan_rows
from upweight.rollout.plan import Plan, PromptOrder
from upweight.rollout.producer import Ranks
from upweight.types import Sample, Unit

SHAPES = {
    "group": st.integers(1, 9),
    "micro": st.integers(1, 12),
    "ranks": st.integers(1, 7),
    "rollout": st.integers(1, 40),
    "seed": st.integers(0, 99),
}


@given(prompts=st.integers(1, 40), epochs=st.integers(1, 3), **SHAPES)
def test_every_prompt_is_written_for_once_an_epoch(*, prompts, group, micro, ranks, rollout, epochs, seed):
    plan, order = Plan.fitting(rollout, group, micro * ranks), PromptOrder(prompts, seed)
    taken: list[int] = []
    while len(taken) < prompts * epochs:
        numbers = order.take(plan.groups)
        by_rank = [numbers[Ranks(rank, ranks).share(len(numbers))] for rank in range(ranks)]
        assert [number for share in by_rank for number in share] == numbers  # each by one rank, in order
        assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1
        taken += numbers
    for epoch in range(epochs):
        assert Counter(taken[epoch * prompts : (epoch + 1) * prompts]) == dict.fromkeys(range(prompts), 1)


@given(**SHAPES)
def test_every_completion_is_trained_on_by_one_rank(*, group, micro, ranks, rollout, seed):
    plan = Plan.fitting(rollout, group, micro * ranks)
    lengths = np.random.default_rng(seed).integers(1, 30, plan.groups * plan.group_size)
    units = [
        Unit(
            (Sample(ids=np.full(3 + length, n // plan.group_size), loss_mask=np.arange(3 + length) >= 3),),
            group=n // plan.group_size,
        )
        for n, length in enumerate(lengths)
    ]
    trained: Counter[int] = Counter()
    for step in range(plan.steps_per_pass):
        own = units[step * plan.step_size : (step + 1) * plan.step_size]
        rows = plan_rows(own, 64, ranks)
        assert len({len(row) for row in rows}) == 1  # as many forwards on every rank
        trained.update(step * plan.step_size + number for rank in rows for row in rank for number in row)
    assert trained == dict.fromkeys(range(len(units)), 1)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_have_about_as_many_tokens(ranks):
    lengths = np.random.default_rng(1).integers(1, 400, 96)
    units = [Unit((Sample(ids=np.arange(n) + 1000 * k, loss_mask=np.ones(n, bool)),)) for k, n in enumerate(lengths)]
    tokens = [sum(int(lengths[u]) for row in rank for u in row) for rank in plan_rows(units, 2048, ranks)]
    assert max(tokens) < 1.15 * sum(tokens) / ranks
