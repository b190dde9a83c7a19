"""Sampling in process with the weights that are being trained: prompts in, completions and their log-probs out."""
