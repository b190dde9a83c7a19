"""Triton kernels of a decoding step: attention over pages, and the draw of tokens."""
