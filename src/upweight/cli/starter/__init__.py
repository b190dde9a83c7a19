"""What `upweight init` writes: sample rows, rewards, configs."""
