"""The reference during training: precomputed log-probs, or weights that are synced with the policy."""
