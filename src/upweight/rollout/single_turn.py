"""Completions straight from a sampling backend: one answer to each prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from upweight.types import Completion, Generator, Group, Sampling


@dataclass
class SingleTurn:
    """Fills groups from a backend."""

    generator: Generator | None  # None where another process samples

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        def take(place: int, completions: list[Completion]) -> None:
            groups[place].completions = completions
            if done is not None:
                done(place)

        assert self.generator is not None, "this process does not sample"
        prompts = [group.prompt_ids for group in groups]
        found = self.generator.generate(prompts, count, sampling, take if done is not None else None)
        if done is None:
            for group, completions in zip(groups, found, strict=True):
                group.completions = completions
