"""The sections of a config: their keys, defaults and help texts."""
