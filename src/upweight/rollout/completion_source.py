"""What fills groups with completions, and the source that a run without an environment has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
