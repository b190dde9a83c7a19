"""Completions for EBFT: short blocks along documents, and turns of known conversations."""
