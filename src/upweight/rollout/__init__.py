"""Prompts -> scored groups: sampling backends, the producer, weight sync, replay."""
