"""Forward packed batches to log-probs, entropy, scores and features, each distinct token once."""

from upweight.engine.forward import Engine

__all__ = ["Engine"]
