"""Joining the process group, and collectives for small objects."""

import datetime
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from upweight.config.sections.training import ShardingSection
from upweight.engine.context_parallel import ContextGroup
from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.processes import free_port
from upweight.runs.command import resume_advice

DEVICE = "UPWEIGHT_DEVICE"  # of the environment: mps
T = TypeVar("T")
Name = TypeVar("Name", str, tuple[str, int])
_wait_seconds: int = ShardingSection().wait_timeout  # for work of other ranks, such as a rollout


def join_ranks(timeout_s: int, wait_s: int = _wait_seconds) -> tuple[PartialState, torch.device]:
    """Return this process's ranks and device; a collective may take `timeout_s`, work of other ranks `wait_s`.

    A process joins once: in a later run it keeps the `timeout_s` of its first.
    """
    global _wait_seconds  # noqa: PLW0603
    _wait_seconds = wait_s
    timeout = datetime.timedelta(seconds=timeout_s)
    on_cpu = not torch.cuda.is_available() and not mps_chosen()
    with activity(f"waiting for all ranks to start (ddp_timeout: {timeout_s} s)"):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and on_cpu and not dist.is_initialized():
            # transformers passes its timeout on for GPUs only, and gloo would then wait 30 minutes for a dead rank
            dist.init_process_group("gloo", timeout=timeout)
        state = PartialState(cpu=True) if on_cpu else PartialState(timeout=timeout)
    assert isinstance(state.device, torch.device)
    return state, state.device


def mps_chosen() -> bool:
    """Return whether the environment asks for Apple's GPU, which is not taken by itself: it was never tried."""
    asked = os.environ.get(DEVICE)
    if asked not in (None, "", "cpu", "mps"):
        raise UserError(f"{DEVICE}: {asked!r} is no choice. Set it to mps or cpu, or leave it out.")
    if asked == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"{DEVICE}: torch finds no MPS device here. Leave it out to train on the CPU.")
    return asked == "mps"


def leave_ranks() -> None:
    """Leave the process group, once: whoever joins again meets the addresses of the first time and waits for ever."""
    if dist.is_initialized():
        dist.destroy_process_group()


def context_parallel_group(size: int) -> ContextGroup | None:
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
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(rendezvous, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")


def local_rank0_first(work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each machine, and then on the others."""
    ranks = PartialState()
    results = [work()] if ranks.is_local_main_process else []
    if ranks.num_processes > 1:
        with patiently() as group:
            dist.barrier(group=group)
    return results[0] if results else work()


def broadcast_from_rank0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if PartialState().num_processes == 1:
        return value
    objects = [value]
    with patiently() as group:
        dist.broadcast_object_list(objects, src=0, group=group)
    return objects[0]


def all_gather_objects(value: Any) -> list[Any]:
    """Return every rank's value on every rank."""
    values: list[Any] = [value] * PartialState().num_processes
    if len(values) > 1:
        with patiently() as group:
            dist.all_gather_object(values, value, group=group)
    return values


def union_over_ranks(names: set[Name]) -> list[Name]:
    """Return the names that any rank has, in the same order on every rank."""
    return sorted({name for of_rank in all_gather_objects(names) for name in of_rank})


class ShardedWork:
    """Runs functions on a sharded model: rank 0 broadcasts each function, and all ranks call it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def run_on_all_ranks(self, work: Callable[[nn.Module], T]) -> T:
        """On rank 0: have every rank call `work` on the model, and return the result."""
        return broadcast_from_rank0(work)(self._model)

    def dismiss(self) -> None:
        """On rank 0: end `follow` on the other ranks."""
        broadcast_from_rank0(None)

    def follow(self) -> None:
        """On the other ranks: call what rank 0 broadcasts until `dismiss`."""
        while (work := broadcast_from_rank0(None)) is not None:
            work(self._model)


@contextmanager
def patiently() -> Iterator[Any]:
    """Yield a gloo group of all ranks with a long timeout: rollouts take long, dead ranks are noticed at once."""
    with activity(f"waiting for the other ranks (ddp_wait_timeout: {_wait_seconds} s)"):
        try:
            yield _group_of(dist.group.WORLD, _wait_seconds)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise UserError(
                f"ddp_wait_timeout: another rank did not come to this point within {_wait_seconds} seconds. Look at "
                f"what it does, or raise it; then {resume_advice()}."
            ) from error


@functools.cache
def _group_of(world: Any, seconds: int) -> Any:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
