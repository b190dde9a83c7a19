"""What fills groups with completions, and the source that a run without an environment has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from upweight.data.images.records import image_refs
from upweight.types import Completion, Completions, Generator, Group, GroupDone, Prompts, Sampling


class CompletionSource(Protocol):
    """Fills groups with completions: a sampling backend, a user's function or an environment."""

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        """Give every group `count` completions; call `done` with the index of each group as it ends."""
        ...

    def close(self) -> None:
        """Release what calls have opened; a later call opens it again."""


def with_images(sampling: Sampling, groups: Sequence[Group]) -> Sampling:
    """Return the sampling with the images of the groups' prompts, if any has some."""
    images = tuple(image_refs(group.row) for group in groups)
    return replace(sampling, images=images) if any(images) else sampling


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
        prompts, sampling = [group.prompt_ids for group in groups], with_images(sampling, groups)
        by_prompt = self.generator.generate(prompts, count, sampling, take if done is not None else None)
        for group, completions in zip(groups, by_prompt, strict=True):
            group.completions = completions


@dataclass
class WithDemonstrations(CompletionSource):
    """Keeps the data's completion, or a teacher's, for a share of the prompts; another source fills the others."""

    source: CompletionSource
    share: float
    teacher: Callable[[Prompts, int, Sampling], Completions] | None = None  # samples them; None: they are the data's

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        numbers = range(sampling.first, sampling.first + len(groups))
        # Drawn by the place in the rollout, so that any number of ranks keeps the same.
        kept = [np.random.default_rng((sampling.seed or 0, number, 1)).random() < self.share for number in numbers]
        shown, left = ([index for index, keeps in enumerate(kept) if keeps == side] for side in (True, False))
        for group in (groups[index] for index in shown if self.teacher is None):
            truth = list(group.row["truth_ids"][0])
            ids = truth[: sampling.max_new_tokens]
            group.completions = [Completion(ids, [], [], len(ids) == len(truth), demonstration=True)] * count
        if self.teacher is not None and shown:
            seeded = _seeded(sampling, [numbers[index] for index in shown], count)
            written = self.teacher([groups[index].prompt_ids for index in shown], count, seeded)
            for index, completions in zip(shown, written, strict=True):
                groups[index].completions = [replace(one, demonstration=True, logps=[]) for one in completions]
        if left:
            sampled = _seeded(sampling, [numbers[index] for index in left], count)
            take = None if done is None else lambda index: done(left[index])
            self.source([groups[index] for index in left], count, sampled, take)
        if done is not None:
            for index in shown:
                done(index)

    def close(self) -> None:
        self.source.close()


def _seeded(sampling: Sampling, numbers: Sequence[int], count: int) -> Sampling:
    """Return the sampling with a seed for each completion of prompts at these places of the rollout."""
    keys = [(sampling.seed or 0, number, member) for number in numbers for member in range(count)]
    return replace(sampling, seeds=tuple(int(np.random.SeedSequence(key).generate_state(1)[0]) for key in keys))
