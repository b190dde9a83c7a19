"""Distributed training: launching ranks, collectives, FSDP2 and DeepSpeed."""
