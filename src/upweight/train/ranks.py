"""Joining the other ranks before anything else happens."""

import datetime
import os

import torch
import torch.distributed as dist
from accelerate import PartialState


def join_ranks(timeout_s: int) -> tuple[PartialState, torch.device]:
    """This process's place among the ranks a launcher started (alone when there is none), and its device."""
    timeout = datetime.timedelta(seconds=timeout_s)
    on_cpu = not torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and on_cpu and not dist.is_initialized():
        # transformers passes its timeout on for GPUs only, and gloo would then wait 30 minutes for a dead rank
        dist.init_process_group("gloo", timeout=timeout)
    state = PartialState(cpu=True) if on_cpu else PartialState(timeout=timeout)
    assert isinstance(state.device, torch.device)
    return state, state.device
