"""Completions from vLLM: its servers, an engine in this process, and how new weights reach them."""
