"""A rollout arrives on other ranks as it was on rank 0, to the last bit and type."""

import dataclasses
import random

import torch
from accelerate import PartialState

from made_runs import on_ranks
from upweight.rollout.rollout import Rollout
from upweight.train.distributed.ranks import join_ranks
from upweight.train.online.broadcast import broadcast_rollout, from_flat, to_flat
from upweight.types import Completion, Group


def drawn_completion(draw, depth=0):
    tokens = draw.choice([0, 1, 5, 40])
    return Completion(
        [draw.randrange(2**31) for _ in range(tokens)],
        [-draw.random() * 10 ** draw.randint(-9, 9) for _ in range(tokens)] if draw.random() < 0.7 else [],
        [draw.randrange(9) for _ in range(tokens)],
        draw.random() < 0.5,
        sampled=[draw.random() < 0.5 for _ in range(tokens)] if draw.random() < 0.5 else None,
        text=draw.choice([None, "said"]),
        messages=draw.choice([None, [{"role": "tool", "content": "4"}]]),
        earlier=[drawn_completion(draw, depth + 1) for _ in range(draw.choice([0, 0, 2]) if depth < 2 else 0)],
        failure=draw.choice([None, "broke"]),
        advantages=[draw.random() for _ in range(tokens)] if draw.random() < 0.5 else [],
    )


def drawn_group(draw, number):
    count = draw.choice([0, 1, 3])
    return Group(
        number,
        {"prompt": "p" * number, "answer": number},
        [draw.randrange(99) for _ in range(draw.choice([0, 3]))],
        [drawn_completion(draw) for _ in range(count)],
        None if draw.random() < 0.2 else torch.tensor([[draw.random(), float("inf")]] * count).reshape(count, 2),
        None if draw.random() < 0.2 else torch.tensor([draw.random()] * count, dtype=torch.float64),
        credits={(number, 0): [(1, 0.5), (4, -1.0)] for number in range(count)},
        extras={"tokens": list(range(count))},
        version=draw.randrange(5),
        replayed=draw.random() < 0.5,
    )


def drawn_rollout(seed):
    draw = random.Random(seed)
    groups = [drawn_group(draw, number) for number in range(draw.choice([0, 1, 6]))]
    return Rollout(seed, draw.randrange(9), groups, {"reward": draw.random()})


def plain(rollout):
    """All that a rollout holds, types and bits included."""
    return repr(dataclasses.asdict(rollout)) + str(
        [(x.dtype, x.tolist()) for g in rollout.groups for x in (g.rewards_SR, g.advantage_S) if x is not None]
    )


def test_any_rollout_is_what_it_was_and_is_left_as_it_is():
    for seed in range(60):
        rollout = drawn_rollout(seed)
        header, numbers = to_flat(rollout)
        assert not any(completion.ids for group in header[0].groups for completion in group.completions)
        assert plain(from_flat(header, numbers)) == plain(drawn_rollout(seed)) == plain(rollout)


def receive():
    join_ranks(60)
    for seed in range(20):
        right = drawn_rollout(seed)
        found = broadcast_rollout(right if PartialState().is_main_process else None)
        assert plain(found) == plain(drawn_rollout(seed))


def test_it_arrives_on_another_rank():
    on_ranks(receive, 2)
