"""Trained models used outside of training: texts that a model writes, scores that a reward model gives."""
