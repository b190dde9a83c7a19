"""Upweight trains language models from feedback, driven by one YAML file."""

__version__ = "0.1.0"
