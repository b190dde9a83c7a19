"""The vLLM server that a run samples from, where it asks for one."""

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from upweight.config.rollout import RolloutSection
from upweight.rollout.settings import request_options
from upweight.rollout.store import Rows
from upweight.rollout.vllm_server import VllmServer
from upweight.serve.address import server_url

FOLDER = "vllm"  # in the run's folder: weights on their way to the server
NO_COLOCATE = "vLLM inside the training process is not supported yet; use a server, or drop 'use_vllm'"
NO_PATTERN = "the sampler in process cannot be held to a pattern; use a vLLM server, or reward the format"


def server_for(
    section: RolloutSection,
    model: Any,
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    folder: Path,
    rows: Rows,
    max_new_tokens: int,
) -> VllmServer | None:
    """The server, waited for and checked, on rank 0, which drives it; None on other ranks and without one."""
    if not section.use_vllm or PartialState().process_index:
        return None
    server = VllmServer(
        server_url(section),
        model,
        tokenizer,
        dtype=dtype,
        folder=folder / FOLDER,
        timeout=section.server_timeout,
        lora_sync=section.lora_sync,
        temperature=section.temperature,
        options=request_options(section),
    )
    server.require_room(
        max((len(rows[number]["prompt_ids"]) for number in range(len(rows))), default=0), max_new_tokens
    )
    return server
