"""Packed batch -> log-probs, entropy, scores, features; every distinct token is forwarded once."""

from upweight.engine.forward import Engine

__all__ = ["Engine"]
