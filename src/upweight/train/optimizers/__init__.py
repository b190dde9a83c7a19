"""Optimizers that are put together here, from those of torch."""
