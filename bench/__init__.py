"""Our training step against TRL's, on the same tokens, on this machine: `python -m bench`."""
