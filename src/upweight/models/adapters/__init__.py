"""Attach an adapter to a model, and merge it into the weights."""
