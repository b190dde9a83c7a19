"""Rollouts in the training loop: assembly, splitting into steps, broadcast over ranks."""
