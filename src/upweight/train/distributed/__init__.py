"""Several processes: starting ranks, agreeing among them, FSDP2 and DeepSpeed."""
