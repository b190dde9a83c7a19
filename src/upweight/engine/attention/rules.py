"""What a layer type adds to the ancestor test: nothing, a sliding window, or chunks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """`window`: a token sees the last so many positions; `chunk`: only positions of its own chunk of that size."""

    window: int | None = None
    chunk: int | None = None
