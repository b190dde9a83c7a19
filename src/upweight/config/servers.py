"""Derives the addresses of vLLM servers, and how weights reach them, from several keys."""

from urllib.parse import urlsplit

from upweight.config.config import Config
from upweight.config.sections.model import AdapterSection
from upweight.config.sections.rollout import RolloutSection

EVERYWHERE = ("0.0.0.0", "::", "")  # a server can listen on these; a client cannot connect to them
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def server_urls(section: RolloutSection) -> list[str]:
    """Return the URLs of all servers that a run samples from."""
    local = local_url(section.server_host or "127.0.0.1", section.server_port or 8000)
    urls = section.server_urls or [local if section.server_url is None else section.server_url]
    plain = [url.rstrip("/").removesuffix("/v1") for url in urls]
    return list(dict.fromkeys(url if "://" in url else f"http://{url}" for url in plain))


def local_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on `host`."""
    address = "127.0.0.1" if host in EVERYWHERE else host
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_url(place: str) -> bool:
    """Whether a place is the address of a server rather than a folder or a hub id."""
    return "://" in place


def is_local(url: str) -> bool:
    """Whether a URL points to this machine."""
    return urlsplit(url).hostname in LOOPBACK


def not_for_vllm(*, dora: bool, modules_to_save: object, target_parameters: object, bias: bool = False) -> str | None:
    """Return the key that makes vLLM unable to load the adapter without merging, or None."""
    options = {"peft_use_dora": dora, "bias": bias}
    options |= {"lora_modules_to_save": bool(modules_to_save), "lora_target_parameters": bool(target_parameters)}
    return next((key for key, is_on in options.items() if is_on), None)


def unloadable_by(adapter: AdapterSection) -> str | None:
    """Return the key of a config's adapter that makes vLLM unable to load it, or None."""
    modules, parameters = adapter.modules_to_save, adapter.target_parameters
    return not_for_vllm(dora=adapter.dora, modules_to_save=modules, target_parameters=parameters)


def adapter_alone(adapter: AdapterSection, lora_sync: bool | None) -> bool:
    """Whether the adapter is sent to vLLM unmerged: `lora_sync` is not off, and vLLM can load the adapter."""
    return adapter.kind is not None and lora_sync is not False and unloadable_by(adapter) is None


def direct_transfer(config: Config) -> str | None:
    """Return the transfer that sends all weights without a folder (nccl or ipc), or None."""
    way = config.rollout.weight_transfer
    return None if way == "folder" or adapter_alone(config.adapter, config.rollout.lora_sync) else way


def samples_from_server(config: Config) -> bool:
    """Whether a run samples completions from vLLM servers."""
    return config.method.online and config.rollout.use_vllm and config.rollout.vllm_mode == "server"
