"""The local attention of a layer type: none, a sliding window, or chunks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """`window`: a token sees the last so many positions; `chunk`: it sees positions of the same chunk of that size."""

    window: int | None = None
    chunk: int | None = None
