"""Two ways for weights to reach a server: an adapter that it loads by name, or all weights read anew from a folder.

Both go through folders that the server can read: on its machine, or on shared storage; `direct_transfer` needs none.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from upweight.errors import UserError
from upweight.files import written_whole
from upweight.models.export import refuse_unmergeable, write_adapter, write_weights
from upweight.rollout.vllm.client import LOAD, RequestFailed, RequestRefused, VllmClient
from upweight.serve.adapters import goes_alone


@dataclass(eq=False)
class ServedVersion:
    """A version of the policy as the server has it."""

    name: str  # that requests ask for
    version: int
    folder: Path
    began: float | None = None  # the run of the server that took it
    users: int = 0  # requests under way
    top_logps: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))  # tokens, and what may follow


@dataclass
class AdapterTransport:
    """A new name for each version: requests under way go on with theirs."""

    drains = False  # whether requests under way must end before new weights are taken
    keeps = True  # whether what was written can be sent again, or to another server

    def name(self, folder: Path) -> str:
        """What requests ask for to be served from the weights of `folder`."""
        return folder.name

    def writer(self, folder: Path) -> Callable[[Any], None]:
        """What writes a model as it is then; every rank that holds a part of it is given this."""
        return partial(write_adapter, folder=folder)

    async def put(self, client: VllmClient, served: ServedVersion) -> None:
        """Have the server take it; returns when it has."""
        body = {"lora_name": served.name, "lora_path": str(served.folder)}
        try:
            await client.ask("/v1/load_lora_adapter", body, seconds=LOAD)
        except RequestRefused as error:
            if "already been loaded" not in str(error):
                raise UserError(_adapter_refused(client.url, error)) from None

    async def holds(self, client: VllmClient, served: ServedVersion) -> bool:
        """Whether the server has it still."""
        return any(entry["id"] == served.name for entry in (await client.ask("/v1/models"))["data"])

    async def drop(self, client: VllmClient, served: ServedVersion) -> None:
        """Have the server forget it, so that its folder may go."""
        with contextlib.suppress(RequestRefused):  # a server that was started anew does not know it
            await client.ask("/v1/unload_lora_adapter", {"lora_name": served.name}, seconds=LOAD)


@dataclass
class WeightTransport:
    """All weights, an adapter merged into them, under the name of the base; answers what the other one does."""

    dtype: torch.dtype
    base: str
    drains = True
    keeps = True

    def name(self, folder: Path) -> str:
        return self.base

    def writer(self, folder: Path) -> Callable[[Any], None]:
        return partial(_write_quietly, folder=folder, dtype=self.dtype)

    async def put(self, client: VllmClient, served: ServedVersion) -> None:
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(served.folder)}}
        try:
            await client.ask("/collective_rpc", call, seconds=LOAD)
            await reset_prefixes(client)
        except RequestRefused as error:
            raise UserError(
                f"the server at {client.url} takes no weights ({error}): start it with `upweight vllm-serve`, which "
                "sets VLLM_SERVER_DEV_MODE=1"
            ) from None
        served.began = (await client.identity()).began

    async def holds(self, client: VllmClient, served: ServedVersion) -> bool:
        return served.began is None or (await client.identity()).began == served.began

    async def drop(self, client: VllmClient, served: ServedVersion) -> None:
        """Nothing: weights are replaced, never forgotten."""


Transport = AdapterTransport | WeightTransport


def transport_for(
    model: PreTrainedModel | PeftModel, lora_sync: bool | None, dtype: torch.dtype, base: str
) -> Transport:
    """How this policy is sent: the adapter alone where it was asked for or left open, if vLLM can load it."""
    if not isinstance(model, PeftModel):
        return WeightTransport(dtype, base)
    config = model.peft_config[model.active_adapters[0]]
    if not isinstance(config, LoraConfig):
        raise UserError(f"adapter: only LoRA can be sent to a vLLM server, not {type(config).__name__}.")
    if goes_alone(
        lora_sync,
        dora=config.use_dora,
        bias=config.bias != "none" or config.lora_bias,
        modules_to_save=config.modules_to_save,
        target_parameters=config.target_parameters,
    ):
        return AdapterTransport()
    refuse_unmergeable(model)
    return WeightTransport(dtype, base)


def write_aside(write: Callable[[Path], None], folder: Path) -> None:
    """Write to a temporary name beside `folder` and rename, so that a server never sees half of it."""
    with written_whole(folder) as part:
        part.mkdir(parents=True)
        write(part)


def link_files(source: Path, folder: Path) -> None:
    """The files of one folder in another, without their bytes a second time where the file system can."""
    for file in source.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / file.name)


async def reset_prefixes(client: VllmClient) -> None:
    """Have the server forget the beginnings of prompts, which otherwise stay those of the old weights."""
    answer = await client.ask("/reset_prefix_cache", {})
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RequestFailed("the server still uses its prefix cache")


async def forget_leftovers(client: VllmClient, folder: Path) -> None:
    """Have the server forget adapters that an earlier run left in this folder, and remove them."""
    for entry in (await client.ask("/v1/models"))["data"]:
        if entry.get("parent") is not None and Path(str(entry.get("root"))).parent == folder:
            with contextlib.suppress(RequestRefused):
                await client.ask("/v1/unload_lora_adapter", {"lora_name": entry["id"]}, seconds=LOAD)
    shutil.rmtree(folder, ignore_errors=True)


def _adapter_refused(url: str, error: Any) -> str:
    if error.status == 404 and "adapter" not in str(error).lower():
        return (
            f"the server at {url} cannot load adapters while it runs: start it with `upweight vllm-serve`, which sets "
            "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set 'trl.vllm_lora_sync: false'"
        )
    return (
        f"the server at {url} does not load the adapter ({error}): it has to see the run's folder under the same path"
    )


def _write_quietly(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Weights are written at every sync: a progress bar for each would bury the log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        write_weights(model, folder, dtype)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
