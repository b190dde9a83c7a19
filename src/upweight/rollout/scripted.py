"""Conversations whose other side is known: the policy writes the assistant's turns, all other messages stand."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from upweight.types import Completion, Generator, Group, Sampling


@dataclass(frozen=True)
class ScriptedTurns:
    """Fills groups turn by turn. A row's `truth_ids` has the true turns and, between them, what others said."""

    generator: Generator | None  # None where another process samples
    end: int | None  # token that closes a turn which was cut

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        assert self.generator is not None, "this process does not sample"
        found = self.generator.generate([group.prompt_ids for group in groups], count, sampling)
        for group, completions in zip(groups, found, strict=True):
            group.completions = completions
        longest = max((len(_replies(group)) for group in groups), default=0)
        for turn in range(longest):
            self._go_on(groups, turn, sampling)
        for place in range(len(groups)):
            if done is not None:
                done(place)

    def _go_on(self, groups: Sequence[Group], turn: int, sampling: Sampling) -> None:
        """One more turn of every conversation that has one."""
        assert self.generator is not None
        open_ = [(place, group) for place, group in enumerate(groups) if turn < len(_replies(group))]
        for _, group in open_:
            group.completions = [self._replied(one, _replies(group)[turn]) for one in group.completions]
        seeds = [
            int(np.random.SeedSequence((sampling.seed or 0, turn, sampling.first + place, member)).generate_state(1)[0])
            for place, group in open_
            for member in range(len(group.completions))
        ]
        texts = [[*group.prompt_ids, *one.ids] for _, group in open_ for one in group.completions]
        found = iter(self.generator.generate(texts, 1, dataclasses.replace(sampling, seeds=tuple(seeds))))
        for _, group in open_:
            group.completions = [_joined(one, next(found)[0]) for one in group.completions]

    def _replied(self, one: Completion, reply: Sequence[int]) -> Completion:
        """A conversation with what others say next; the policy did not write that."""
        closing = [] if one.finished or self.end is None else [self.end]
        given = [*closing, *reply]
        return dataclasses.replace(
            one,
            ids=[*one.ids, *given],
            logps=[*one.logps, *[0.0] * len(given)] if one.logps else [],
            versions=[*one.versions, *[one.versions[-1]] * len(given)],
            sampled=[*(one.sampled or [True] * len(one.ids)), *[False] * len(given)],
        )


def _replies(group: Group) -> list[list[int]]:
    return group.row["truth_ids"][1::2]


def _joined(before: Completion, turn: Completion) -> Completion:
    known = bool(before.logps) and len(turn.logps) == len(turn.ids)
    return dataclasses.replace(
        before,
        ids=[*before.ids, *turn.ids],
        logps=[*before.logps, *turn.logps] if known else [],
        versions=[*before.versions, *turn.versions],
        sampled=[*(before.sampled or []), *[True] * len(turn.ids)],
        finished=turn.finished,
    )
