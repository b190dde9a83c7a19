"""Weight transfer through folders that the server can read: an adapter that it loads by name, or all weights."""

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
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from upweight.config.rules.rollout import ONLY_MERGED
from upweight.config.servers import not_for_vllm
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.models.export import refuse_unmergeable, write_unmerged, write_weights
from upweight.models.modules import unwrap_peft
from upweight.models.vision import vision_family, vision_module_names
from upweight.rollout.vllm.client import RequestFailed, RequestRefused, VllmClient


@dataclass(eq=False)
class ServedVersion:
    """A version of the policy on a server."""

    name: str  # the model name in requests
    version: int
    folder: Path
    began: float | None = None  # start time of the server process that loaded it
    users: int = 0  # running requests
    top_logps: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))  # tokens; logps after them
    with_image: tuple[list[int], list[float]] | None = None  # tokens and log-probs of the probe with an image


@dataclass
class AdapterTransport:
    """Sends a LoRA adapter under a new name for each version, so running requests keep theirs."""

    drains = False  # whether running requests must end before new weights are loaded
    keeps = True  # whether the written files can be sent again, or to another server

    def name(self, folder: Path) -> str:
        """Return the model name in requests for the weights of `folder`."""
        return folder.name

    def writer(self, folder: Path) -> Callable[[Any], None]:
        """Return the function that writes a model to `folder`; every rank that holds a part of the model calls it."""
        return partial(write_unmerged, folder=folder, dtype=torch.float32)

    async def put(self, client: VllmClient, served: ServedVersion) -> None:
        """Have the server load the version; return when it has."""
        body = {"lora_name": served.name, "lora_path": str(served.folder)}
        try:
            await client.ask("/v1/load_lora_adapter", body, seconds=client.load_seconds)
        except RequestRefused as error:
            if "already been loaded" in str(error):
                return
            if error.status == 404 and "adapter" not in str(error).lower():
                raise UserError(
                    f"the server at {client.url} cannot load adapters while it runs: start it with `upweight "
                    "vllm-serve`, which sets --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set "
                    "'trl.vllm_lora_sync: false'"
                ) from None
            problem = f"does not load the adapter ({error}): it must see its folder at that path"
            raise UserError(f"the server at {client.url} {problem}") from None

    async def holds(self, client: VllmClient, served: ServedVersion) -> bool:
        return any(entry["id"] == served.name for entry in (await client.ask("/v1/models"))["data"])

    async def drop(self, client: VllmClient, served: ServedVersion) -> None:
        """Unload the version, so that its folder can be removed."""
        await _unload_adapter(client, served.name)


@dataclass
class WeightTransport:
    """Sends all weights, with an adapter merged, under the name of the base; has the methods of AdapterTransport."""

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
            await client.ask("/collective_rpc", call, seconds=client.load_seconds)
            await reset_prefixes(client)
        except RequestRefused as error:
            remedy = "start it with `upweight vllm-serve`, which sets VLLM_SERVER_DEV_MODE=1"
            raise UserError(f"the server at {client.url} takes no weights ({error}): {remedy}") from None
        served.began = (await client.identity()).began

    async def holds(self, client: VllmClient, served: ServedVersion) -> bool:
        return served.began is None or (await client.identity()).began == served.began

    async def drop(self, client: VllmClient, served: ServedVersion) -> None:
        """Do nothing, since the next version replaces the weights."""


Transport = AdapterTransport | WeightTransport


def transport_for(
    model: PreTrainedModel | PeftModel, lora_sync: bool | None, dtype: torch.dtype, base: str
) -> Transport:
    """Choose the transport: the adapter alone unless `lora_sync` is False, if vLLM can load it."""
    if not isinstance(model, PeftModel):
        return WeightTransport(dtype, base)
    lora_config = model.peft_config[model.active_adapters[0]]
    if not isinstance(lora_config, LoraConfig):
        raise UserError(f"adapter: only LoRA can be sent to a vLLM server, not {type(lora_config).__name__}.")
    unloadable = not_for_vllm(
        dora=lora_config.use_dora,
        bias=lora_config.bias != "none" or lora_config.lora_bias,
        modules_to_save=lora_config.modules_to_save,
        target_parameters=lora_config.target_parameters,
    )
    if unloadable is None and _adapts_vision(model):  # vLLM would leave that part of the adapter out
        unloadable = "freeze_vision"
    if lora_sync and unloadable is not None:
        raise UserError(f"{unloadable}: {ONLY_MERGED}.")
    if lora_sync is not False and unloadable is None:
        return AdapterTransport()
    refuse_unmergeable(model)
    return WeightTransport(dtype, base)


def _adapts_vision(model: PeftModel) -> bool:
    """Return whether an adapter has weights that only images go through."""
    base = unwrap_peft(model)
    if vision_family(base.config) is None:
        return False
    parts = [base.get_submodule(name) for name in vision_module_names(base)]
    return any(isinstance(module, LoraLayer) for part in parts for module in part.modules())


def write_aside(write: Callable[[Path], None], folder: Path) -> None:
    """Write a folder atomically, so that a server never reads an incomplete one."""
    with atomic_path(folder) as part:
        part.mkdir(parents=True)
        write(part)


def link_files(source: Path, folder: Path) -> None:
    """Link the files of a folder into another one, or copy them where the file system has no links."""
    for file in source.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / file.name)


async def reset_prefixes(client: VllmClient) -> None:
    """Reset the caches of prefixes and of the features of images, which were computed with the old weights."""
    answer = await client.ask("/reset_prefix_cache", {})
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RequestFailed("the server still uses its prefix cache")
    with contextlib.suppress(RequestRefused):  # servers that have no such cache read no images either
        await client.ask("/reset_encoder_cache", {})


async def forget_leftovers(client: VllmClient, folder: Path) -> None:
    """Unload and remove the adapters that an earlier run left in this folder."""
    for entry in (await client.ask("/v1/models"))["data"]:
        if entry.get("parent") is not None and Path(str(entry.get("root"))).parent == folder:
            await _unload_adapter(client, entry["id"])
    shutil.rmtree(folder, ignore_errors=True)


async def _unload_adapter(client: VllmClient, name: str) -> None:
    with contextlib.suppress(RequestRefused):  # a restarted server does not have it
        await client.ask("/v1/unload_lora_adapter", {"lora_name": name}, seconds=client.load_seconds)


def _write_quietly(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Write weights without a progress bar, which every sync would repeat in the log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        write_weights(model, folder, dtype)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
