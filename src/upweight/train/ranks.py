"""Joining the other ranks before anything else happens, and agreeing with them on small things."""

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


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


def first_here_then_others(work: Callable[[], T]) -> T:
    """Let one rank of each machine do some work, however long it takes, before the others find it done."""
    ranks = PartialState()
    if ranks.num_processes == 1:
        return work()
    group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))  # a dead rank is noticed at once
    assert isinstance(group, dist.ProcessGroup)
    if not ranks.is_local_main_process:
        dist.barrier(group=group)
        return work()
    result = work()
    dist.barrier(group=group)
    return result


def as_rank_zero_says(value: Any) -> Any:
    """Rank 0's value on every rank."""
    return broadcast_object_list([value])[0] if PartialState().num_processes > 1 else value


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    everyone: list[Any] = [value] * PartialState().num_processes
    if len(everyone) > 1:
        dist.all_gather_object(everyone, value)
    return everyone


class LargestOverRanks:
    """The largest of the ranks' numbers, through the CPU: it does not wait for the GPU."""

    def __init__(self) -> None:
        self._group: Any = None

    def __call__(self, number: int) -> int:
        if PartialState().num_processes == 1:
            return number
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return int(largest)
