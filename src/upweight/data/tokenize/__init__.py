"""Turns text and messages into token ids: chat templates, loss masks, length limits."""
