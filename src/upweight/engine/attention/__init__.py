"""Attention in which a token sees only its ancestors in a prefix tree."""
