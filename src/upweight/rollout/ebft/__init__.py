"""Completions for EBFT: short blocks along documents, and assistant turns of known conversations."""
