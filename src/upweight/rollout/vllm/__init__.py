"""Completions from vLLM servers or an engine in this process, and the transfer of new weights to them."""
