"""Keys that cannot both be set."""

from collections.abc import Iterator
from itertools import combinations

from upweight.config.config import Config

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
    ("fp16", "bfloat16"),
)


def exclusive(config: Config) -> Iterator[str]:
    """Reject each pair of exclusive keys that are both on."""
    on = {path for path, value in config.set_keys.items() if value not in (False, 0, [], {}, "")}
    for keys in EXCLUSIVE:
        for first, second in combinations(keys, 2):
            if first in on and second in on:
                yield f"{second}: cannot be used with '{first}'. Keep one."
    if config.model.bf16 is True and config.model.fp16:
        yield "fp16: cannot be used with 'bf16: true'. Keep one."
