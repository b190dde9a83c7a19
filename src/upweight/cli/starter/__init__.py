"""What `upweight init` writes (a config, sample rows, rewards), and `upweight choose`, which finds the method."""
