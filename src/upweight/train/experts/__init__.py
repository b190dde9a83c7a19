"""Mixtures of experts in training: the load-balancing loss of a step, and the loads of its experts."""
