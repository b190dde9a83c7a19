"""Rollouts that act: tools, environment classes, OpenEnv, NeMo Gym."""
