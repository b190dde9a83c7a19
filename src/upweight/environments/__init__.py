"""Environments for multi-turn rollouts: tools, Python classes, OpenEnv, NeMo Gym."""
