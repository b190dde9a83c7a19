"""Rules across keys: what a config may not ask for together, by subject."""
