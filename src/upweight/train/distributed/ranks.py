"""Joining the other ranks before anything else happens, and agreeing with them on small things."""

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from upweight.engine.context import Context
from upweight.errors import UserError
from upweight.processes import free_port

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


def share_rows(size: int) -> Context | None:
    """Form groups of `size` consecutive ranks that share each row; this rank's group, or None where it is alone."""
    if size == 1:
        return None
    ranks = PartialState()
    if ranks.num_processes % size:
        raise UserError(
            f"context_parallel_size: {size} does not divide the number of processes, {ranks.num_processes}; start a "
            f"multiple of {size} with --num-processes, or set it to 1"
        )
    group, _ = dist.new_subgroups(size)
    assert isinstance(group, dist.ProcessGroup)
    return Context(group, ranks.process_index % size, size)


def init_single_rank() -> None:
    """Let a process that no launcher started be rank 0 of one, for what cannot be without ranks."""
    if "RANK" in os.environ:
        return
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_PORT=str(free_port()))


def rank0_first(work: Callable[[], T]) -> T:
    """Let one rank of each machine do some work, however long it takes, before the others find it done."""
    ranks = PartialState()
    if ranks.num_processes == 1:
        return work()
    if not ranks.is_local_main_process:
        dist.barrier(group=no_timeout_group())
        return work()
    result = work()
    dist.barrier(group=no_timeout_group())
    return result


def broadcast_from_rank0(value: Any) -> Any:
    """Rank 0's value on every rank, waited for as long as it takes to come about."""
    if PartialState().num_processes == 1:
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0, group=no_timeout_group())
    return said[0]


def all_gather_objects(value: Any) -> list[Any]:
    """Every rank's value, on every rank, waited for as long as the slowest takes."""
    everyone: list[Any] = [value] * PartialState().num_processes
    if len(everyone) > 1:
        dist.all_gather_object(everyone, value, group=no_timeout_group())
    return everyone


class ShardedWork:
    """Work on a model whose weights lie in pieces over the ranks: rank 0 says what is to be done, and all do it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def lead(self, work: Callable[[nn.Module], T]) -> T:
        """On rank 0: the result of some work that every rank does on its part."""
        return broadcast_from_rank0(work)(self._model)

    def dismiss(self) -> None:
        """On rank 0: there is no more to do for now."""
        broadcast_from_rank0(None)

    def follow(self) -> None:
        """On the other ranks: do what rank 0 says until it says no more."""
        while (work := broadcast_from_rank0(None)) is not None:
            work(self._model)


def no_timeout_group() -> Any:
    """All ranks, through the CPU, without a time-out: a rollout takes its time, and a dead rank is noticed at once."""
    return _group_of(dist.group.WORLD)


@functools.cache
def _group_of(world: Any) -> Any:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))


class MaxOverRanks:
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
