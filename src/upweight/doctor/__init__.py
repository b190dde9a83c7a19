"""What `upweight doctor` checks before and after a run: the machine, a config, a run folder."""
