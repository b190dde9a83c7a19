"""The loop around the engine; the only package that knows transformers' Trainer."""
