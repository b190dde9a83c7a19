"""Attach an adapter to a model, and fold it into the weights again."""
