"""The reference during training: log-probs computed once beforehand, or weights that follow the policy."""
