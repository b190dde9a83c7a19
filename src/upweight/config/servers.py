"""Where vLLM servers are and how weights reach them: what follows from several keys together."""

from urllib.parse import urlsplit

from upweight.config.config import Config
from upweight.config.sections.model import AdapterSection
from upweight.config.sections.rollout import RolloutSection

EVERYWHERE = ("0.0.0.0", "::", "")  # listened on, but no place to go to
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def server_urls(section: RolloutSection) -> list[str]:
    """The addresses of all servers that a training run talks to."""
    given = section.server_urls or ([section.server_url] if section.server_url is not None else [])
    if not given:
        return [local_url(section.server_host or "127.0.0.1", section.server_port or 8000)]
    plain = [one.rstrip("/").removesuffix("/v1") for one in given]
    return list(dict.fromkeys(one if "://" in one else f"http://{one}" for one in plain))


def local_url(host: str, port: int) -> str:
    """The address of a server that listens on `host`."""
    reached = "127.0.0.1" if host in EVERYWHERE else host
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def is_on_this_machine(url: str) -> bool:
    """Whether an address leads to the machine that asks."""
    return urlsplit(url).hostname in LOOPBACK


def not_for_vllm(*, dora: bool, modules_to_save: object, target_parameters: object, bias: bool = False) -> str | None:
    """The key that makes an adapter one which vLLM cannot load by itself, if one does."""
    asked = {
        "peft_use_dora": dora,
        "bias": bias,
        "lora_modules_to_save": modules_to_save,
        "lora_target_parameters": target_parameters,
    }
    return next((key for key, on in asked.items() if on), None)


def unloadable_by(adapter: AdapterSection) -> str | None:
    """The same of the adapter that a config describes."""
    return not_for_vllm(
        dora=adapter.dora, modules_to_save=adapter.modules_to_save, target_parameters=adapter.target_parameters
    )


def adapter_alone(adapter: AdapterSection, lora_sync: bool | None) -> bool:
    """Whether the adapter that a config describes is sent by itself: asked for or left open, and vLLM can load it."""
    return adapter.kind is not None and lora_sync is not False and unloadable_by(adapter) is None


def direct_transfer(config: Config) -> str | None:
    """How all weights reach the server without a folder, where they do."""
    way = config.rollout.weight_transfer
    return None if way == "folder" or adapter_alone(config.adapter, config.rollout.lora_sync) else way


def samples_from_server(config: Config) -> bool:
    """Whether a run's completions come from vLLM servers."""
    return config.method.online and config.rollout.use_vllm and config.rollout.vllm_mode == "server"
