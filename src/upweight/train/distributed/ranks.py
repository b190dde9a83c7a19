"""Joining the process group, and collectives for small objects."""

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from upweight.engine.context import ContextGroup
from upweight.errors import UserError
from upweight.processes import free_port

T = TypeVar("T")
Name = TypeVar("Name", str, tuple[str, int])


def join_ranks(timeout_s: int) -> tuple[PartialState, torch.device]:
    """Return the distributed state of this process (a single rank without a launcher) and its device."""
    timeout = datetime.timedelta(seconds=timeout_s)
    on_cpu = not torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and on_cpu and not dist.is_initialized():
        # transformers passes its timeout on for GPUs only, and gloo would then wait 30 minutes for a dead rank
        dist.init_process_group("gloo", timeout=timeout)
    state = PartialState(cpu=True) if on_cpu else PartialState(timeout=timeout)
    assert isinstance(state.device, torch.device)
    return state, state.device


def share_rows(size: int) -> ContextGroup | None:
    """Form context-parallel groups of `size` consecutive ranks; return this rank's group, or None if `size` is 1."""
    if size == 1:
        return None
    ranks, count = PartialState(), PartialState().num_processes
    if count % size:
        remedy = f"start a multiple of {size} with --num-processes, or set it to 1"
        raise UserError(f"context_parallel_size: {size} does not divide the number of processes, {count}; {remedy}")
    group, _ = dist.new_subgroups(size)
    assert isinstance(group, dist.ProcessGroup)
    return ContextGroup(group, ranks.process_index % size, size)


def init_single_rank() -> None:
    """Set the variables of a world of one rank where no launcher did, for code that needs a process group."""
    if "RANK" in os.environ:
        return
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(place, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")


def rank0_first(work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each machine, without a timeout, and then on the others."""
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
    """Return rank 0's value on every rank, without a timeout."""
    if PartialState().num_processes == 1:
        return value
    objects = [value]
    dist.broadcast_object_list(objects, src=0, group=no_timeout_group())
    return objects[0]


def all_gather_objects(value: Any) -> list[Any]:
    """Return every rank's value on every rank, without a timeout."""
    values: list[Any] = [value] * PartialState().num_processes
    if len(values) > 1:
        dist.all_gather_object(values, value, group=no_timeout_group())
    return values


def union_over_ranks(names: set[Name]) -> list[Name]:
    """Return the names that any rank has, in the same order on every rank."""
    return sorted({name for of_rank in all_gather_objects(names) for name in of_rank})


class ShardedWork:
    """Runs functions on a sharded model: rank 0 broadcasts each function, and all ranks call it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def lead(self, work: Callable[[nn.Module], T]) -> T:
        """On rank 0: have every rank call `work` on the model, and return the result."""
        return broadcast_from_rank0(work)(self._model)

    def dismiss(self) -> None:
        """On rank 0: end `follow` on the other ranks."""
        broadcast_from_rank0(None)

    def follow(self) -> None:
        """On the other ranks: call what rank 0 broadcasts until `dismiss`."""
        while (work := broadcast_from_rank0(None)) is not None:
            work(self._model)


def no_timeout_group() -> Any:
    """Return a gloo group of all ranks with a timeout of days: rollouts take long, dead ranks are noticed at once."""
    return _group_of(dist.group.WORLD)


@functools.cache
def _group_of(world: Any) -> Any:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=7))
