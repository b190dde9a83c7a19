"""Prompts to scored groups: completion sources, the producer, weight sync, replay."""
