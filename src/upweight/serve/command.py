"""Builds the command line and environment of a vLLM OpenAI server from a config."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upweight.config import Config
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.config.sections.rollout import VllmSection
from upweight.config.servers import LOOPBACK, adapter_alone, direct_transfer
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.settings import values_by_path

# Keys that a server has no flag for, or whose flag depends on more than the key.
NOT_PASSED_ON = {"vllm.device", "vllm.enable_reasoning", "vllm.max_lora_rank", "vllm.tool_call_parser"}
TESTED_VLLM = ("0.26", "0.32")
# Adapters that share a batch: the version in use, and the one before while its last requests end.
LIVE_ADAPTERS = 2
# Further versions stay in host memory. vLLM reads an evicted one from disk again, and dies if the folder is gone.
KEPT_ADAPTERS = 8
# Gym agents pass tools, which vLLM refuses without a parser; this one fits most models.
AGENTS_PARSER = "hermes"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's `max_lora_rank` may have


@dataclass(frozen=True)
class Command:
    """The command line, and variables to add to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def serve_command(config: Config, *, python: str = sys.executable) -> Command:
    """Return the server command for training with `config`; `python` is the interpreter that has vLLM."""
    # The module and not the `vllm` script, which fails for vLLM's CPU packages because they have another name.
    return Command((python, "-m", "vllm.entrypoints.openai.api_server", *_flags(config)), _env_variables(config))


def trained_command(
    model: ModelSection, adapter: Path | None, name: str, vllm: VllmSection, *, port: int, python: str = sys.executable
) -> Command:
    """Return the command that serves a trained model on this machine; an adapter beside its base, named `base`."""
    if model.base_model is None or model.gguf_file is not None or model.base_model.endswith(".gguf"):
        merged = "vLLM does not serve adapters on a GGUF file; `upweight export RUN --to vllm` writes what it serves"
        raise UserError(f"base_model: {merged}.")
    values: dict[str, Any] = {
        **_passed_on(vllm),
        "--model": model.base_model,
        "--served-model-name": "base" if adapter else name,
        "--revision": model.revision,
        "--trust-remote-code": model.trust_remote_code or None,
        "--host": "127.0.0.1",
        "--port": port,
    }
    if adapter is not None:
        values |= {"--enable-lora": True, "--lora-modules": f"{name}={adapter}"}
        values["--max-lora-rank"] = allowed_rank(largest_rank(AdapterSection(folder=str(adapter))))
        if (adapter / "tokenizer_config.json").is_file():
            values["--tokenizer"] = str(adapter)  # with the chat template of training
    argv = (python, "-m", "vllm.entrypoints.openai.api_server", *_arguments(values))
    return Command(argv, {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"})


def warnings_of(config: Config, version: str) -> Iterator[str]:
    """Yield warnings to show before the server starts."""
    if config.vllm.host not in LOOPBACK:
        exposed = f"{config.vllm.host} can be reached from elsewhere, and routes that change weights are not protected"
        yield f"vllm.host: {exposed}; use 127.0.0.1, or a network that only you can reach"
    if direct_transfer(config) == "ipc" and version.startswith("0.26"):
        yield "vLLM 0.26 does not start with trl.vllm_weight_transfer: ipc unless ray is installed beside it"
    if not any(version == known or version.startswith(f"{known}.") for known in TESTED_VLLM):
        yield f"vLLM {version} is not tested; {' and '.join(TESTED_VLLM)} are"


def _flags(config: Config) -> Iterator[str]:
    """Yield the arguments of the server: flags, each followed by its value if it takes one."""
    model, vllm = config.model, config.vllm
    if model.base_model is None:
        raise UserError("base_model: missing. Name the model to serve: a hub id or a folder.")
    if model.gguf_file is not None or model.base_model.endswith(".gguf"):
        raise UserError("gguf_file: vLLM does not serve it; save the model unpacked; name its folder as base_model.")
    values = {
        "--model": model.base_model,
        "--served-model-name": model.base_model,
        "--tokenizer": model.tokenizer,
        "--revision": model.revision,
        "--trust-remote-code": model.trust_remote_code or None,
        # Log-probs at the sampling temperature, and no sampling defaults of the model.
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    yield from _arguments(values | _passed_on(vllm))
    if config.rollout.routing_replay is not False:
        yield "--enable-return-routed-experts"
        if not vllm.scale_out:  # the route that returns them
            yield "--enable-scale-out"
    by_agents = config.gym.enabled and config.gym.multi_turn
    if vllm.tool_call_parser is not None or by_agents:
        yield from ("--enable-auto-tool-choice", "--tool-call-parser", vllm.tool_call_parser or AGENTS_PARSER)
    if adapter_alone(config.adapter, config.rollout.lora_sync):
        rank = allowed_rank(vllm.max_lora_rank or largest_rank(config.adapter))
        yield from ("--enable-lora", "--max-lora-rank", str(rank))
        yield from ("--max-loras", str(LIVE_ADAPTERS), "--max-cpu-loras", str(KEPT_ADAPTERS))
    elif (way := direct_transfer(config)) is not None:
        yield from ("--weight-transfer-config", json.dumps({"backend": way}))


def _arguments(values: dict[str, Any]) -> Iterator[str]:
    """Yield flags with their values; a switch has none, and None leaves a flag out."""
    for flag, value in values.items():
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif value is not None:
            yield from (flag, value if isinstance(value, str) else json.dumps(value))


def _passed_on(vllm: VllmSection) -> dict[str, Any]:
    """Return the flag and value of each key; a switch that is off by default needs no flag when it is off."""
    defaults = values_by_path(type(vllm)())
    values = {path: value for path, value in values_by_path(vllm).items() if value or value != defaults[path]}
    flags = {path: "--" + path.removeprefix("vllm.").replace("_", "-") for path in values.keys() - NOT_PASSED_ON}
    return {flag: values[path] for path, flag in sorted(flags.items())}


def _env_variables(config: Config) -> dict[str, str]:
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if adapter_alone(config.adapter, config.rollout.lora_sync):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if direct_transfer(config) == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # memory handles are sent pickled
    if config.vllm.host in LOOPBACK:
        env["VLLM_HOST_IP"] = "127.0.0.1"
    device = config.vllm.device
    if numbered := re.fullmatch(r"cuda:(\d+(?:,\d+)*)", device):
        env["CUDA_VISIBLE_DEVICES"] = numbered[1]
    elif device != "auto":
        warn_once(f"vllm.device: no effect: vLLM serves on what it was built for; '{device}' is not chosen at start")
    return env


def allowed_rank(rank: int) -> int:
    """Return the smallest `max_lora_rank` of vLLM that holds `rank`."""
    allowed = next((size for size in LORA_RANKS if size >= rank), None)
    if allowed is None:
        raise UserError(f"lora_r: vLLM serves adapters up to rank {LORA_RANKS[-1]}, not {rank}; lower it.")
    return allowed


def largest_rank(section: AdapterSection) -> int:
    """Return the largest rank of the adapter that a config describes or continues."""
    adapter_config = Path(section.folder) / "adapter_config.json" if section.folder else None
    if adapter_config is not None and adapter_config.is_file():
        stored: dict[str, Any] = json.loads(adapter_config.read_text(encoding="utf-8"))
        return max([int(stored["r"]), *map(int, (stored.get("rank_pattern") or {}).values())])
    return max([section.rank, *section.rank_pattern.values()])
