"""Fused kernels for the layers of transformers models."""
