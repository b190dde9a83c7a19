"""Weight transfer without files, by vLLM's engine: memory of a shared GPU (CUDA IPC), or NCCL between GPUs."""

import asyncio
import base64
import contextlib
import pickle
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from upweight.errors import UserError
from upweight.event_loop import settle
from upweight.log import warn_once
from upweight.models.export import exported_weights
from upweight.processes import free_port
from upweight.rollout.vllm.client import RequestFailed, RequestRefused, VllmClient
from upweight.rollout.vllm.file_transfer import ServedVersion, Transport, WeightTransport, reset_prefixes
from upweight.runs.command import resume_advice

T = TypeVar("T")
Chunk = list[tuple[str, Tensor]]
FOLDER = "folder"
CHUNK_BYTES = 256 * 2**20  # bytes sent at a time; a larger tensor is sent alone
FLAG_AT_START = (0, 27)  # from this vLLM on, the packing format is declared once instead of with each chunk


class SharedMemory:
    """Sends chunks through the memory of the server's GPU; the server copies each before it answers."""

    name = "ipc"

    async def connect(self, client: VllmClient) -> None:
        version = re.match(r"(\d+)\.(\d+)", str((await client.ask("/version"))["version"]))
        self._flag = {} if version and (int(version[1]), int(version[2])) >= FLAG_AT_START else {"packed": True}
        init = {} if self._flag else {"packed": True}
        await client.ask("/init_weight_transfer_engine", {"init_info": init}, seconds=client.load_seconds)

    async def send(self, client: VllmClient, chunk: Chunk) -> None:
        """Send a chunk; return when the server has loaded it."""
        flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in chunk]
        packed = torch.cat(flat)  # a new tensor for each chunk, since torch counts the users of shared memory by export
        _, handle = reduce_tensor(packed)
        uuid = str(torch.cuda.get_device_properties(packed.device).uuid)
        torch.cuda.synchronize(packed.device)
        handles = base64.b64encode(pickle.dumps({uuid: handle})).decode()
        body = _describe_chunk(chunk) | {"tensor_sizes": [len(part) for part in flat], "ipc_handles_pickled": handles}
        await client.ask("/update_weights", {"update_info": body | self._flag}, seconds=client.load_seconds)
        del packed
        torch.cuda.ipc_collect()

    def disconnect(self) -> None:
        """Do nothing, since shared memory is freed with each chunk."""


class Broadcast:
    """Sends chunks by NCCL, in a group of the trainer and the server's workers."""

    name = "nccl"

    def __init__(self) -> None:
        self._group: Any = None

    async def connect(self, client: VllmClient) -> None:
        from vllm.distributed.weight_transfer import nccl_common  # pyright: ignore[reportMissingImports]

        workers = (await client.ask("/get_world_size"))["world_size"]
        parts = urlsplit(client.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # nothing is sent
            address = probe.getsockname()[0]  # of this machine, as the server can reach it
        rendezvous = {"master_address": address, "master_port": free_port(address), "world_size": workers + 1}
        init = {"init_info": rendezvous | {"rank_offset": 1}}
        request = client.ask("/init_weight_transfer_engine", init, seconds=client.load_seconds)
        try:
            self._group = await _run_beside(request, partial(nccl_common.trainer_init, rendezvous))
        except RuntimeError as error:
            raise UserError(
                f"trl.vllm_weight_transfer: nccl: no group with {client.url} ({error}). Trainer and server need a GPU "
                "each, and a network between them; use 'ipc' on one GPU, or 'folder'."
            ) from None

    async def send(self, client: VllmClient, chunk: Chunk) -> None:

        def broadcast() -> None:
            with torch.cuda.device(chunk[0][1].device):
                whole = [tensor.detach().contiguous() for _, tensor in chunk]  # kept until the group has them
                for tensor in whole:
                    self._group.broadcast(tensor, src=0)
                torch.cuda.synchronize()

        request = client.ask("/update_weights", {"update_info": _describe_chunk(chunk)}, seconds=client.load_seconds)
        try:
            await _run_beside(request, broadcast)
        except RuntimeError as error:
            raise RequestFailed(f"nccl: {error}") from error

    def disconnect(self) -> None:
        """Leave the group, since a broadcast that the server no longer expects would never end."""
        if self._group is not None:
            self._group.destroy()
        self._group = None


@dataclass
class DirectTransport(WeightTransport):
    """Sends all weights in chunks from the trainer's memory; nothing is kept, so nothing can be sent again."""

    channel: SharedMemory | Broadcast
    keeps = False
    _weights: Callable[[], Iterator[tuple[str, Tensor]]] | None = field(default=None, init=False)
    _connected_to: float | None = field(default=None, init=False)  # start time of the server process

    def writer(self, folder: Path) -> Callable[[Any], None]:
        """Return a function that stores a model, whose weights must not change until `put` returns."""

        def remember(model: Any) -> None:
            self._weights = partial(exported_weights, model, self.dtype)

        return remember

    async def put(self, client: VllmClient, served: ServedVersion) -> None:
        weights, self._weights = self._weights, None
        if weights is None:
            raise UserError(
                f"the server at {client.url} was restarted, and weights sent by {self.channel.name} are not kept: "
                f"{resume_advice()}; 'trl.vllm_weight_transfer: folder' would send them again"
            )
        try:
            began = (await client.identity()).began
            if began is None or began != self._connected_to:
                try:
                    await self.channel.connect(client)
                except RequestFailed as error:
                    if error.status is None:
                        raise
                    raise UserError(_not_prepared(client.url, self.channel.name, error)) from None
            await client.ask("/start_weight_update", {}, seconds=client.load_seconds)
            for chunk in chunks(weights()):
                await self.channel.send(client, chunk)
            await client.ask("/finish_weight_update", {}, seconds=client.load_seconds)
            await reset_prefixes(client)
        except RequestRefused as error:
            raise UserError(_not_prepared(client.url, self.channel.name, error)) from None
        except Exception:  # the server and the channel are then in the middle of an update
            self._connected_to = None
            self.channel.disconnect()
            with contextlib.suppress(RequestFailed, RequestRefused):  # else the server keeps waiting for the rest
                await client.ask("/finish_weight_update", {})
            raise
        self._connected_to = served.began = began


def direct_transport(transfer: str, transport: Transport) -> Transport:
    """Choose the transport by `trl.vllm_weight_transfer`, which applies where all weights are sent."""
    if transfer == FOLDER:
        return transport
    if not isinstance(transport, WeightTransport):
        warn_once("trl.vllm_weight_transfer: no effect: the adapter alone is sent")
        return transport
    return DirectTransport(transport.dtype, transport.base, SharedMemory() if transfer == "ipc" else Broadcast())


def chunks(weights: Iterator[tuple[str, Tensor]], limit: int | None = None) -> Iterator[Chunk]:
    """Yield chunks of consecutive tensors of one dtype, up to `limit` bytes; a larger tensor alone."""
    chunk: Chunk = []
    size = 0
    for name, tensor in weights:
        if chunk and (size + tensor.nbytes > (limit or CHUNK_BYTES) or tensor.dtype != chunk[0][1].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


def _describe_chunk(chunk: Chunk) -> dict[str, Any]:
    """Return the names, dtypes and shapes that the server needs before the tensors."""
    return {
        "names": [name for name, _ in chunk],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
        "shapes": [list(tensor.shape) for _, tensor in chunk],
    }


async def _run_beside(request: Any, work: Callable[[], T]) -> T:
    """Run work that ends only together with a request to the server; the first failure is raised."""
    # The work runs in a daemon thread, since it may never end where the server fails.
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()
    threading.Thread(target=settle, args=(result, work), name="vllm-nccl", daemon=True).start()
    answer, done = asyncio.ensure_future(request), asyncio.wrap_future(result)
    try:
        ended, _ = await asyncio.wait({answer, done}, return_when=asyncio.FIRST_EXCEPTION)
        for future in ended:
            future.result()
        return done.result()
    finally:
        answer.cancel()


def _not_prepared(url: str, way: str, error: Exception) -> str:
    return (
        f"the server at {url} takes no weights by {way} ({error}): start it with `upweight vllm-serve` and the same "
        f"'trl.vllm_weight_transfer: {way}', or use 'folder'"
    )
