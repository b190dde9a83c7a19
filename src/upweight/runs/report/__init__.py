"""A run folder -> one page for people to read; imports neither torch nor transformers, so that it opens at once."""
