"""The sections of a config, one file each: their keys, defaults and help."""
