"""Keys that are required, that exclude each other, or that another key has to turn on."""

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from upweight.config.config import Config, general_keys
from upweight.config.sections.rollout import IN_PROCESS
from upweight.methods import feature_matcher

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("rl", "reward_model", "process_reward_model"),
    ("gradient_accumulation_steps", "batch_size"),
    ("warmup_steps", "warmup_ratio"),
    ("save_steps", "saves_per_epoch"),
    ("eval_steps", "evals_per_epoch"),
    ("embedding_lr", "embedding_lr_scale"),
    ("trl.generation_batch_size", "trl.steps_per_generation"),
    ("deepspeed", "fsdp"),
    ("trl.vllm_server_base_url", "trl.vllm_server_base_urls"),
    ("load_in_4bit", "load_in_8bit"),
    ("test_datasets", "val_set_size"),
    ("distill.teacher", "distill.teachers"),
    ("distill.teacher_load_in_4bit", "distill.teacher_load_in_8bit"),
    ("fp16", "bfloat16"),
)
COLOCATE = "trl.vllm_enable_sleep_mode trl.vllm_gpu_* trl.vllm_max_model_length trl.vllm_tensor_parallel_size"
SERVER = "trl.vllm_server_* trl.vllm_weight_transfer vllm.*"
VLLM = f"{COLOCATE} {SERVER} trl.vllm_mode trl.vllm_sync_interval trl.vllm_lora_sync"
# Keys (a name that ends in `*` is a prefix), what they need to have an effect, and whether a config has it.
SWITCHES: tuple[tuple[str, str, Callable[[Config], Any]], ...] = (
    (VLLM, "trl.use_vllm: true", lambda c: c.rollout.use_vllm),
    (COLOCATE, "trl.vllm_mode: colocate", lambda c: not c.rollout.use_vllm or c.rollout.vllm_mode == "colocate"),
    (SERVER, "trl.vllm_mode: server", lambda c: not c.rollout.use_vllm or c.rollout.vllm_mode == "server"),
    ("trl.prefetch_depth trl.max_staleness", "trl.async_prefetch: true", lambda c: c.rollout.async_prefetch),
    ("trl.release_sampler", "trl.use_vllm: false", lambda c: c.rollout.backend == IN_PROCESS),
    ("trl.rollout_backend_kwargs", "trl.rollout_backend", lambda c: c.rollout.backend != IN_PROCESS),
    ("trl.streaming_min_groups", "trl.streaming_partial_batch: true", lambda c: c.rollout.streaming),
    ("trl.replay_recompute_* trl.replay_max_age", "trl.replay_buffer_size' above '0", lambda c: c.rollout.replay_size),
    ("trl.reroll_max_groups", "trl.reroll_start_fraction' below '1", lambda c: c.rollout.reroll_start < 1),
    ("nemo_gym_*", "nemo_gym_enabled: true", lambda c: c.gym.enabled),
)


def required(config: Config) -> Iterator[str]:
    """Require a model, data, a reward for online methods, and the block of EBFT."""
    given, method = config.set_keys, config.method
    if "base_model" not in given:
        yield "base_model: missing. Name the model to train: a hub id or a folder."
    if not given.get("datasets") and not given.get("nemo_gym_datasets"):
        yield "datasets: missing. List what to train on."
    rewarded = given.get("trl.reward_funcs") or config.gym.enabled or config.environment.kind
    if method.online and method.needs_rewards and not method.computed_rewards and not rewarded:
        yield "trl.reward_funcs: missing. A group of completions is compared by rewards: name at least one."
    if method.needs_teacher and not config.teacher.places:
        yield "distill.teacher: missing. Name the model to learn from: a folder, a hub id or a vLLM server's URL."
    if feature_matcher(method) and not any(path.startswith("ebft.") for path in given):
        yield "ebft: missing. `rl: ebft` needs its block; `ebft: {mode: structured}` takes every default."


def exclusive(config: Config) -> Iterator[str]:
    """Reject each pair of exclusive keys that are both on."""
    on = {path for path, value in config.set_keys.items() if value not in (False, 0, [], {}, "")}
    for keys in EXCLUSIVE:
        for first, second in combinations(keys, 2):
            if first in on and second in on:
                yield f"{second}: cannot be used with '{first}'. Keep one."
    if config.model.bf16 is True and config.model.fp16:
        yield "fp16: cannot be used with 'bf16: true'. Keep one."


def switched_off(config: Config) -> Iterator[str]:
    """Warn about keys of online runs whose switch is off; `rollout.without_use` covers offline runs."""
    if not config.method.online:
        return
    # In strided mode, the rules of EBFT cover the keys of these blocks.
    unread = ("nemo_gym_enabled", *(("trl.", "vllm.") if config.method.strided else ()))
    asked = asked_keys(config)
    asked = [path for path in asked if not path.startswith(unread)]
    for keys, needs, is_on in SWITCHES:
        if (stray := matching(asked, keys)) and not is_on(config):
            yield f"{', '.join(stray)}: no effect on training without '{needs}'"


def asked_keys(config: Config) -> list[str]:
    """Return the keys that are set to another value than their default."""
    defaults = {path: key.field.default for path, (_, key) in general_keys().items()}
    # A default that is written out, as in a run's config.yaml, asks for nothing.
    return [path for path, value in config.set_keys.items() if value != defaults.get(path)]


def matching(paths: Iterable[str], patterns: str) -> list[str]:
    """Return the paths that match one of the patterns, which stand in one line of text."""
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns.split())]
