"""What fills groups with completions, and the source that a run without an environment has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from upweight.types import Completion, Generator, Group, GroupDone, Sampling


class CompletionSource(Protocol):
    """Fills groups with completions: a sampling backend, a user's function or an environment."""

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        """Give every group `count` completions; call `done` with the index of each group as it ends."""
        ...

    def close(self) -> None:
        """Release what calls have opened; a later call opens it again."""


@dataclass
class SingleTurn(CompletionSource):
    """Fills groups with completions of their prompts from a sampling backend."""

    generator: Generator | None  # None where another process samples

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        def take(index: int, completions: list[Completion]) -> None:
            groups[index].completions = completions
            if done is not None:
                done(index)

        assert self.generator is not None, "this process does not sample"
        prompts = [group.prompt_ids for group in groups]
        by_prompt = self.generator.generate(prompts, count, sampling, take if done is not None else None)
        for group, completions in zip(groups, by_prompt, strict=True):
            group.completions = completions


@dataclass
class WithDemonstrations(CompletionSource):
    """Keeps the data's completion for a share of the prompts, and leaves the others to another source."""

    source: CompletionSource
    share: float

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        numbers = range(sampling.first, sampling.first + len(groups))
        # Drawn by the place in the rollout, so that any number of ranks keeps the same.
        kept = [np.random.default_rng((sampling.seed or 0, number, 1)).random() < self.share for number in numbers]
        for group in (group for group, keeps in zip(groups, kept, strict=True) if keeps):
            ids = list(group.row["truth_ids"][0])[: sampling.max_new_tokens]
            finished = len(ids) == len(group.row["truth_ids"][0])
            group.completions = [Completion(ids, [], [], finished, demonstration=True)] * count
        left = [index for index, keeps in enumerate(kept) if not keeps]
        if left:
            seeds = tuple(_seed(sampling, numbers[index], member) for index in left for member in range(count))
            sampled = replace(sampling, seeds=seeds)
            take = None if done is None else lambda index: done(left[index])
            self.source([groups[index] for index in left], count, sampled, take)
        if done is not None:
            for index in (index for index, keeps in enumerate(kept) if keeps):
                done(index)

    def close(self) -> None:
        self.source.close()


def _seed(sampling: Sampling, number: int, member: int) -> int:
    return int(np.random.SeedSequence((sampling.seed or 0, number, member)).generate_state(1)[0])
