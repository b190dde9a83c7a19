"""Warns about keys that have no effect because the key that enables them is off."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from upweight.config.config import Config, general_keys


class Switch(NamedTuple):
    """Keys (a name that ends in `*` is a prefix) and the condition under which they have an effect."""

    keys: str
    needs: str
    is_on: Callable[[Config], bool]


SWITCHES: tuple[Switch, ...] = (
    Switch(
        "trl.vllm_mode trl.vllm_server_* trl.vllm_enable_sleep_mode trl.vllm_gpu_memory_utilization"
        " trl.vllm_max_model_length trl.vllm_tensor_parallel_size trl.vllm_sync_interval trl.vllm_lora_sync"
        " trl.vllm_weight_transfer vllm.*",
        "trl.use_vllm: true",
        lambda c: c.rollout.use_vllm,
    ),
    Switch(
        "trl.vllm_enable_sleep_mode trl.vllm_gpu_memory_utilization trl.vllm_max_model_length"
        " trl.vllm_tensor_parallel_size",
        "trl.vllm_mode: colocate",
        lambda c: not c.rollout.use_vllm or c.rollout.vllm_mode == "colocate",
    ),
    Switch(
        "trl.vllm_server_* trl.vllm_weight_transfer vllm.*",
        "trl.vllm_mode: server",
        lambda c: not c.rollout.use_vllm or c.rollout.vllm_mode == "server",
    ),
    Switch("trl.prefetch_depth trl.max_staleness", "trl.async_prefetch: true", lambda c: c.rollout.async_prefetch),
    Switch("trl.streaming_min_groups", "trl.streaming_partial_batch: true", lambda c: c.rollout.streaming),
    Switch(
        "trl.replay_recompute_logps trl.replay_max_age",
        "trl.replay_buffer_size' above '0",
        lambda c: c.rollout.replay_size > 0,
    ),
    Switch("trl.reroll_max_groups", "trl.reroll_start_fraction' below '1", lambda c: c.rollout.reroll_start < 1),
    Switch("nemo_gym_*", "nemo_gym_enabled: true", lambda c: c.gym.enabled),
)


def switched_off(config: Config) -> Iterator[str]:
    """Warn about keys of online runs whose switch is off; `rollout.without_use` covers offline runs."""
    if not config.method.online:
        return
    # The rules of EBFT cover the keys of these blocks in strided mode.
    unread = ("trl.", "vllm.") if config.method.strided else ()
    for switch in SWITCHES:
        stray = [path for path in config.set_keys if _names(switch.keys, path) and not path.startswith(unread)]
        stray = [path for path in stray if path != "nemo_gym_enabled" and config.set_keys[path] != _default(path)]
        if stray and not switch.is_on(config):
            yield f"{', '.join(stray)}: no effect on training without '{switch.needs}'"


def _default(path: str) -> object:
    """Return the default of a key: one that is written out, as in a run's config.yaml, asks for nothing."""
    return general_keys()[path][1].field.default if path in general_keys() else None


def _names(keys: str, path: str) -> bool:
    return any(path.startswith(key[:-1]) if key.endswith("*") else path == key for key in keys.split())
