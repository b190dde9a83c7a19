"""Joining the other ranks before anything else happens."""

import datetime
import os

import torch
import torch.distributed as dist
from accelerate import PartialState


def join_ranks(timeout_s: int) -> PartialState:
    """This process's place among the ranks a launcher started; alone when there is none."""
    on_cpu = not torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and on_cpu and not dist.is_initialized():
        # transformers passes its timeout on for GPUs only, and gloo would then wait 30 minutes for a dead rank
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return (
        PartialState(cpu=on_cpu, timeout=datetime.timedelta(seconds=timeout_s))
        if not on_cpu
        else PartialState(cpu=True)
    )
