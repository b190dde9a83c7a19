"""Rows whose order is decided while they are trained on: streams that are encoded ahead, and weighted mixtures."""
