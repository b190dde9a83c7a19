"""A run folder -> one page for people to read. Imports neither torch nor transformers, so that it opens at once."""
