"""Rollouts inside the training loop: put together, fed into steps, shared by ranks, written down."""
