"""Kernels of our own for layers of foreign models."""
