"""Single-turn completions from a sampling backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from upweight.types import Completion, Generator, Group, Sampling


@dataclass
class SingleTurn:
    """Fills groups with completions of their prompts."""

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
        by_prompt = self.generator.generate(prompts, count, sampling, take if done is not None else None)
        for group, completions in zip(groups, by_prompt, strict=True):
            group.completions = completions
