"""Completions over several turns: episodes with tools, environments and the agents of NeMo Gym."""
