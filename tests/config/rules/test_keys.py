"""Keys whose subject is off: each is named, once, and only where it was set."""

from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.config.config import general_keys
from upweight.config.rules.keys import SWITCHES

VLLM = {"trl.use_vllm": True}
COLOCATED = {**VLLM, "trl.vllm_mode": "colocate"}
# a key, a value, what turns it on, and the words that name the switch
DEAD = [
    ("trl.vllm_sync_interval", 2, VLLM, "trl.use_vllm: true"),
    ("trl.vllm_mode", "colocate", VLLM, "trl.use_vllm: true"),
    ("trl.vllm_server_port", 8001, VLLM, "trl.use_vllm: true"),
    ("trl.vllm_lora_sync", False, VLLM, "trl.use_vllm: true"),
    ("trl.vllm_gpu_memory_utilization", 0.5, COLOCATED, "trl.use_vllm: true"),
    ("trl.rollout_backend_kwargs", {"a": 1}, {"trl.rollout_backend": "b.C"}, "trl.rollout_backend"),
    ("vllm.port", 8001, VLLM, "trl.use_vllm: true"),
    ("vllm.tensor_parallel_size", 2, VLLM, "trl.use_vllm: true"),
    ("trl.prefetch_depth", 2, {**VLLM, "trl.async_prefetch": True}, "trl.async_prefetch: true"),
    ("trl.max_staleness", 2, {**VLLM, "trl.async_prefetch": True}, "trl.async_prefetch: true"),
    ("trl.streaming_min_groups", 2, {"trl.streaming_partial_batch": True}, "trl.streaming_partial_batch: true"),
    ("trl.replay_recompute_logps", False, {"trl.replay_buffer_size": 8}, "trl.replay_buffer_size"),
    ("trl.replay_max_age", 8, {"trl.replay_buffer_size": 8}, "trl.replay_buffer_size"),
    ("trl.reroll_max_groups", 2, {"trl.reroll_start_fraction": 0.5}, "trl.reroll_start_fraction"),
    ("nemo_gym_dir", "~/gym", {"nemo_gym_enabled": True, "nemo_gym_auto_start": False,
                               "nemo_gym_datasets": [{"path": "d"}]}, "nemo_gym_enabled: true"),
]  # fmt: skip


def notices(keys, **options):
    content = {"base_model": "m", "datasets": [{"path": "d"}], "rl": "grpo", "trl": {"reward_funcs": ["r.f"]}}
    for path, value in keys.items():
        block, dot, name = path.rpartition(".")
        (content.setdefault(block, {}) if dot else content)[name] = value
    return parse_config(content, folder=Path(), **options).notices


@pytest.mark.parametrize(("key", "value", "switch", "needs"), DEAD, ids=[key for key, *_ in DEAD])
def test_a_key_without_its_switch_is_named_with_it_and_acts_beside_it(key, value, switch, needs):
    (said,) = notices({key: value})
    assert said.startswith(f"{key}: no effect on training without '{needs}")
    assert not any("no effect" in one for one in notices({**switch, key: value}))


def test_a_part_of_a_config_is_not_asked_for_switches():
    assert notices({"trl.vllm_sync_interval": 2}, fragment=True) == ()


@pytest.mark.parametrize(
    ("key", "value", "mode", "needs"),
    [
        ("trl.vllm_gpu_memory_utilization", 0.5, "server", "trl.vllm_mode: colocate"),
        ("trl.vllm_server_port", 8001, "colocate", "trl.vllm_mode: server"),
        ("vllm.port", 8001, "colocate", "trl.vllm_mode: server"),
    ],
)
def test_keys_of_the_other_way_to_run_vllm_are_named(key, value, mode, needs):
    (said,) = notices({**VLLM, "trl.vllm_mode": mode, key: value})
    assert said == f"{key}: no effect on training without '{needs}'"


def test_every_key_of_the_table_exists():
    for key in " ".join(keys for keys, _, _ in SWITCHES).split():
        assert any(path.startswith(key[:-1]) if key.endswith("*") else path == key for path in general_keys())
