"""Attention in which a token sees its ancestors in a prefix tree and nothing else."""
