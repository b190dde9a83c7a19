"""The backends that sample completions, by the name that the config gives them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from upweight.config import Config
from upweight.config.rules.rollout import ONE_PROCESS
from upweight.config.sections.rollout import IN_PROCESS
from upweight.config.servers import server_urls
from upweight.engine.routing import install_routing
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.modules import unwrap_peft
from upweight.rollout.custom import CustomBackend
from upweight.rollout.fed_prompts import FedPrompts
from upweight.rollout.rollout import PromptRows
from upweight.rollout.sampling_params import request_options
from upweight.rollout.vllm.colocated import VllmColocated
from upweight.rollout.vllm.served_routes import ServedRoutes
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.servers import VllmServers
from upweight.rollout.vllm.versions import OnModel
from upweight.sampler.in_process import InProcess
from upweight.train.distributed.ranks import ShardedWork
from upweight.train.policy import Policy
from upweight.types import Generator, Sampling
from upweight.user_modules import load_function

WEIGHTS = "vllm"  # folder in the run's folder: weights on their way to the server


@dataclass(frozen=True)
class BackendInputs:
    """What a backend may be built from."""

    config: Config
    policy: Policy
    rows: PromptRows
    sampling: Sampling
    sharded_work: ShardedWork | None = None  # reads the weights, where ranks hold shards of them


@dataclass(frozen=True)
class Backend:
    """How a backend is built, on every rank, and which ranks sample with it."""

    build: Callable[[BackendInputs], Generator | None]
    rank0_only: bool = False  # rank 0 samples for all ranks; else each rank samples its share
    threaded: bool = False  # rollouts that run ahead are sampled beside training, since it does not use the model


def in_process(inputs: BackendInputs) -> InProcess:
    """Return the in-process sampler; raise now where the longest row would not fit."""
    policy, rows, sampling = inputs.policy, inputs.rows, inputs.sampling
    generator = InProcess(
        policy.model,
        policy.tokenizer,
        engine=policy.engine,
        end_ids=() if policy.method.strided else None,
        device=PartialState().device if policy.sharded else None,  # sharded weights may still be on the CPU
        compile=inputs.config.rollout.compile_sampler,
        reserved=policy.reserved,
        records=policy.engine.replay is not None,
        int8=inputs.config.rollout.sampler_quantization is not None,
    )
    numbers = [] if isinstance(rows, FedPrompts) else range(len(rows))
    longest = max(
        (_longest_context(rows[number], sampling) for number in numbers),
        default=inputs.config.data.max_prompt_length or 0,
    )
    generator.require_room(longest, sampling.max_new_tokens)
    return generator


def vllm_server(inputs: BackendInputs) -> VllmServer | VllmServers | None:
    """Return the checked servers on rank 0, and None on other ranks."""
    section, policy = inputs.config.rollout, inputs.policy
    if PartialState().process_index:
        return None
    urls, folder = server_urls(section), Path(inputs.config.run.output_dir)

    def connect(url: str, number: int | None = None, on_model: OnModel | None = None) -> VllmServer:
        return VllmServer(
            url,
            policy.model,
            policy.tokenizer,
            folder=folder / (WEIGHTS if number is None else f"{WEIGHTS}-{number}"),
            timeout=section.server_timeout,
            transfer=section.weight_transfer,
            on_model=on_model,
            **_vllm_options(inputs),
        )

    server = connect(urls[0]) if len(urls) == 1 else VllmServers(urls, connect)
    server.require_room(_longest_prompt(inputs), inputs.sampling.max_new_tokens)
    if inputs.sharded_work is not None:
        server.on_model(inputs.sharded_work.run_on_all_ranks)
    return server


def vllm_colocated(inputs: BackendInputs) -> VllmColocated:
    """Return a vLLM engine in this process."""
    section, policy = inputs.config.rollout, inputs.policy
    if PartialState().num_processes > 1:
        raise UserError(f"trl.vllm_mode: {ONE_PROCESS}.")
    if section.weight_transfer != "folder":
        warn_once("trl.vllm_weight_transfer: no effect with 'vllm_mode: colocate'")
    return VllmColocated(
        policy.model,
        policy.tokenizer,
        folder=Path(inputs.config.run.output_dir) / WEIGHTS,
        longest=section.colocate_length or _longest_prompt(inputs) + inputs.sampling.max_new_tokens,
        memory=section.colocate_memory,
        parallel=section.colocate_parallel,
        sleeps=section.sleep_mode,
        **_vllm_options(inputs),
    )


def user_backend(kind: Callable[..., Any], inputs: BackendInputs) -> CustomBackend | None:
    """Return the backend of the user's class; None where rank 0 samples for this rank."""
    section, policy = inputs.config.rollout, inputs.policy
    if _rank0_only(kind) and PartialState().process_index:
        return None
    path, options = str(section.rollout_backend), section.rollout_backend_args
    backend = CustomBackend(kind, path, policy.model, policy.tokenizer, options)
    backend.require_room(_longest_prompt(inputs), inputs.sampling.max_new_tokens)
    return backend


BACKENDS = {
    IN_PROCESS: Backend(in_process),
    "vllm_server": Backend(vllm_server, rank0_only=True, threaded=True),
    "vllm_colocate": Backend(vllm_colocated, rank0_only=True, threaded=True),
}


def backend_of(config: Config) -> Backend:
    """Return the backend that the config chooses, by its name or as the class that `trl.rollout_backend` names."""
    if (name := config.rollout.backend) in BACKENDS:
        return BACKENDS[name]
    kind = load_function(name, config.folder, "trl.rollout_backend")
    return Backend(partial(user_backend, kind), rank0_only=_rank0_only(kind))


def _rank0_only(kind: Any) -> bool:
    return bool(getattr(kind, "rank0_only", False))


def _vllm_options(inputs: BackendInputs) -> dict[str, Any]:
    section = inputs.config.rollout
    options = {"lora_sync": section.lora_sync, "temperature": section.temperature}
    options["probes_images"] = _has_images(inputs.rows)
    if inputs.policy.engine.replay is not None:
        options["routes"] = ServedRoutes(install_routing(unwrap_peft(inputs.policy.model)))
    return options | {"dtype": inputs.policy.dtype, "options": request_options(section)}


def _has_images(rows: PromptRows) -> bool:
    """Return whether prepared rows have a column of images."""
    return not isinstance(rows, FedPrompts) and len(rows) > 0 and "images" in rows[0]


def _longest_prompt(inputs: BackendInputs) -> int:
    """Return the tokens of the longest prompt; of a stream, what `max_prompt_length` allows."""
    rows = inputs.rows
    if isinstance(rows, FedPrompts):
        return inputs.config.data.max_prompt_length or 0
    return max((len(rows[number]["prompt_ids"]) for number in range(len(rows))), default=0)


def _longest_context(row: Mapping[str, Any], sampling: Sampling) -> int:
    """Return the most tokens that a row may have before its last sampled turn."""
    if "prompt_ids" not in row:  # a document; a prompt may have a column of the user's named `input_ids`
        return len(row["input_ids"]) - sampling.max_new_tokens
    replies = (row.get("truth_ids") or [])[1::2]
    return len(row["prompt_ids"]) + sum(len(reply) + sampling.max_new_tokens for reply in replies)
