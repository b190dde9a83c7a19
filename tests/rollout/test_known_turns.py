"""Conversations whose other side is known."""

from upweight.rollout.ebft import KnownTurns
from upweight.types import Completion, Group, Sampling

END = 2


class Sampler:
    """Writes the number of tokens that it was given, and an end where there is room; keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, count, sampling, done=None):
        self.asked.append(([list(prompt) for prompt in prompts], count, sampling))
        ends = sampling.max_new_tokens > 1
        written = [[100 + len(prompt), END] if ends else [100 + len(prompt)] for prompt in prompts]
        return [[Completion(ids, [-1.0] * len(ids), [7] * len(ids), finished=ends)] * count for ids in written]


def group(number, *turns):
    return Group(number, {"truth_ids": [list(turn) for turn in turns]}, [5] * (number + 1))


def test_every_turn_is_sampled_after_what_was_said_before():
    sampler, groups = Sampler(), [group(0, [9], [30, 31], [9]), group(1, [9]), group(2, [9], [40], [9], [41], [9])]
    KnownTurns(sampler, END)(groups, 2, Sampling(4, seed=1), None)
    assert groups[0].completions[0].ids == [101, END, 30, 31, 105, END]
    assert groups[0].completions[0].sampled == [True, True, False, False, True, True]
    assert groups[1].completions[0].ids == [102, END]
    assert groups[1].completions[0].sampled is None
    assert groups[2].completions[1].ids == [103, END, 40, 106, END, 41, 109, END]
    for one in (one for own in groups for one in own.completions):
        assert len(one.ids) == len(one.logps) == len(one.versions)
    assert [count for _, count, _ in sampler.asked] == [2, 1, 1]
    assert [len(prompts) for prompts, *_ in sampler.asked] == [3, 4, 2]
    seeds = [sampling.seeds for *_, sampling in sampler.asked[1:]]
    assert len(set(seeds[0] + seeds[1])) == 6


def test_a_turn_that_was_cut_is_closed_before_the_reply():
    groups = [group(0, [9], [30], [9])]
    KnownTurns(Sampler(), END)(groups, 1, Sampling(1, seed=1), None)
    (one,) = groups[0].completions
    assert (one.ids, one.sampled, one.finished) == ([101, END, 30, 104], [True, False, False, True], False)


def test_what_a_rank_samples_does_not_depend_on_its_neighbours():
    alone, together = Sampler(), Sampler()
    turns = ([9], [30], [9])
    KnownTurns(together, END)([group(0, *turns), group(0, *turns)], 2, Sampling(4, seed=1), None)
    KnownTurns(alone, END)([group(0, *turns)], 2, Sampling(4, seed=1, first=1), None)
    assert alone.asked[1][2].seeds == together.asked[1][2].seeds[2:]
