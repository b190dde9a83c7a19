"""Turns that are ready are sampled together."""

import asyncio
import threading

import numpy as np

from upweight.errors import UserError
from upweight.rollout.episodes.turn_batcher import FirstTurnBatcher, TurnBatcher, _cut
from upweight.types import Completion, Sampling


class Echo:
    """Writes the seed of each completion, as often as it may."""

    def __init__(self):
        self.calls = []

    def require_room(self, prompt, new):
        if prompt + new > 20:
            raise UserError("no room")

    def generate(self, prompts, count, sampling, done=None):
        self.calls.append([len(prompt) for prompt in prompts])
        seeds, length = iter(sampling.seeds), sampling.max_new_tokens
        return [
            [Completion([next(seeds)] * length, [0.0] * length, [0] * length, True) for _ in range(count)]
            for _ in prompts
        ]


def together(work, episodes):
    """Run `work(turns)` on a loop of another thread while turns are served here."""
    turns, found = TurnBatcher(Echo(), Sampling(9), active=episodes), []

    def run():
        try:
            found.append(asyncio.run(work(turns)))
        finally:
            turns.end()

    thread = threading.Thread(target=run)
    thread.start()
    turns.serve(None)
    thread.join()
    return found[0], turns.generator.calls


def test_all_that_wait_are_one_call_and_each_keeps_to_its_own_limit():
    async def work(turns):
        return await asyncio.gather(*(turns.sample([1] * n, n, [10 + n]) for n in range(1, 5)))

    found, calls = together(work, 4)
    assert [sorted(call) for call in calls] == [[1, 2, 3, 4]]
    assert [one.ids for (one,) in found] == [[10 + n] * n for n in range(1, 5)]
    assert [one.finished for (one,) in found] == [False, False, False, True]


def test_a_long_prompt_is_not_refused_for_the_room_that_a_short_one_has():
    async def work(turns):
        return await asyncio.gather(*(turns.sample([1] * n, 18 - n, [n]) for n in (2, 10, 16)))

    found, calls = together(work, 3)
    assert [len(one.ids) for (one,) in found] == [16, 8, 2]
    assert calls == [[2], [10], [16]]


def test_nobody_waits_for_long_for_those_who_are_not_ready():
    async def work(turns):
        first = asyncio.ensure_future(turns.sample([1], 1, [5]))
        await asyncio.sleep(0.2)
        was_done = first.done()
        await turns.sample([1, 1], 1, [6])
        return was_done

    was_done, calls = together(work, 2)
    assert was_done
    assert calls == [[1], [2]]


def test_first_turns_wait_for_their_group_and_are_shared():
    async def work(turns):
        first = FirstTurnBatcher(turns, 4)
        asked = [first.sample(prompt, 2, seed) for prompt, seed in (([1, 2], 7), ([1, 2], 8), ([3], 9))]
        waiting = asyncio.gather(*asked)
        await asyncio.sleep(0.1)
        assert turns.generator.calls == []
        turns.end_episode()
        first.count_episode()
        return await waiting

    found, calls = together(work, 4)
    assert [one.ids for one in found] == [[7, 7], [8, 8], [9, 9]]
    assert sorted(calls) == [[1], [2]]


def test_a_turn_that_is_cut_keeps_the_experts_of_what_is_left():
    routes = np.arange(5, dtype=np.int16).reshape(5, 1, 1)  # two tokens of the prompt, and three
    cut = _cut(Completion([7, 8, 9], [0.0] * 3, [0] * 3, True, routes=routes), 1)
    assert cut.routes is not None
    assert (cut.ids, cut.routes.ravel().tolist()) == ([7], [0, 1, 2])
