"""A program that nobody trusts, run in a process of its own that is cut off as far as the system allows."""
