"""The `upweight` command: one file a command."""
