"""How a layer attends: its local attention, and the scale, cap and sinks of its scores."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """`window`: a token sees the last so many positions; `chunk`: it sees positions of the same chunk of that size."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """How a layer attends: its rule, the scale and soft cap of its scores, and the sink logit of each head."""

    rule: Rule
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
