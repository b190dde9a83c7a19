"""The vLLM that a run samples from: servers, or a colocated engine."""

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from upweight.config.rules.rollout import ONE_PROCESS
from upweight.config.sections.rollout import RolloutSection
from upweight.config.servers import server_urls
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rollout.rollout import PromptRows
from upweight.rollout.sampling_params import request_options
from upweight.rollout.vllm.colocated import VllmColocated
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.servers import VllmServers
from upweight.rollout.vllm.versions import OnModel

Vllm = VllmServer | VllmServers | VllmColocated
FOLDER = "vllm"  # in the run's folder: weights on their way to the server


def server_for(
    section: RolloutSection,
    model: Any,
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    folder: Path,
    rows: PromptRows,
    max_new_tokens: int,
) -> Vllm | None:
    """Return the engine or the checked servers on rank 0; None on other ranks and without vLLM."""
    if not section.use_vllm:
        return None
    longest = max((len(rows[number]["prompt_ids"]) for number in range(len(rows))), default=0)
    options: dict[str, Any] = {
        "dtype": dtype,
        "lora_sync": section.lora_sync,
        "temperature": section.temperature,
        "options": request_options(section),
    }
    if section.vllm_mode == "colocate":
        if PartialState().num_processes > 1:
            raise UserError(f"trl.vllm_mode: {ONE_PROCESS}.")
        if section.weight_transfer != "folder":
            warn_once("trl.vllm_weight_transfer: no effect with 'vllm_mode: colocate'")
        return VllmColocated(
            model,
            tokenizer,
            folder=folder / FOLDER,
            longest=section.colocate_length or longest + max_new_tokens,
            memory=section.colocate_memory,
            parallel=section.colocate_parallel,
            sleeps=section.sleep_mode,
            **options,
        )
    if PartialState().process_index:
        return None
    urls = server_urls(section)

    def connect(url: str, number: int | None = None, on_model: OnModel | None = None) -> VllmServer:
        return VllmServer(
            url,
            model,
            tokenizer,
            folder=folder / (FOLDER if number is None else f"{FOLDER}-{number}"),
            timeout=section.server_timeout,
            transfer=section.weight_transfer,
            on_model=on_model,
            **options,
        )

    server = connect(urls[0]) if len(urls) == 1 else VllmServers(urls, connect)
    server.require_room(longest, max_new_tokens)
    return server
