"""Runs an untrusted program in a separate process, isolated as far as the system allows."""
