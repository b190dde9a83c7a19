"""`memory: lean | balanced | fast`: the keys that it sets, and those that it leaves."""

from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.config.resolve import memory_settings
from upweight.errors import UserError

DPO = {"base_model": "m", "datasets": [{"path": "d"}], "rl": "dpo"}
GRPO = {"base_model": "m", "datasets": [{"path": "d"}], "rl": "grpo", "trl": {"reward_funcs": ["r.f"]}}
SFT = {"base_model": "m", "datasets": [{"path": "d"}]}
FSDP = {"fsdp": ["full_shard"]}


def parsed(base, **keys):
    return parse_config({**base, **keys}, folder=Path())


def test_balanced_is_the_default_and_sets_nothing():
    assert parsed(GRPO).optim == parsed(GRPO, memory="balanced").optim
    assert memory_settings(parsed(GRPO)) == {}


def test_lean_sets_every_saving():
    config = parsed(DPO, memory="lean")
    optim = config.optim
    assert optim.gradient_checkpointing
    assert optim.checkpointing_args == {"every_layer": True}
    assert optim.activation_offloading
    assert optim.tiled_mlp
    assert optim.reference_offloading
    assert (optim.token_budget, optim.head_chunk) == (None, 256)  # rows by the free memory
    assert not parsed(SFT, memory="lean").optim.reference_offloading  # there is no reference
    online = parsed(GRPO, memory="lean")
    assert online.rollout.release_sampler
    assert "trl.release_sampler" in memory_settings(online)
    assert memory_settings(config).keys() < memory_settings(online).keys() | {"reference_offloading"}


def test_fast_keeps_what_fits():
    optim = parsed(GRPO, memory="fast").optim
    assert optim.gradient_checkpointing
    assert 0.5 < optim.checkpointing_args["keep"] < 1
    assert (optim.token_budget, optim.head_chunk) == (None, None)


def test_what_is_written_stays():
    written = {"gradient_checkpointing": False, "token_budget": 77, "activation_offloading": False}
    config = parsed(GRPO, memory="lean", **written)
    assert not config.optim.gradient_checkpointing
    assert not config.optim.activation_offloading
    assert not config.optim.tiled_mlp  # which needs recomputation
    assert config.optim.token_budget == 77
    assert config.optim.checkpointing_args == {}  # without recomputation its options would do nothing
    assert not set(memory_settings(config)) & set(written)
    options = parsed(SFT, memory="lean", gradient_checkpointing_kwargs={"use_reentrant": True}).optim
    assert options.checkpointing_args == {"use_reentrant": True, "every_layer": True}
    every = parsed(SFT, memory="fast", gradient_checkpointing_kwargs={"every_layer": True}).optim
    assert every.checkpointing_args == {"every_layer": True}


@pytest.mark.parametrize("base", [DPO, GRPO, SFT])
@pytest.mark.parametrize("mode", ["lean", "fast"])
def test_with_shards_only_what_goes_with_them_is_set(base, mode):
    config = parsed(base, memory=mode, **FSDP)  # whose rules refuse offloading
    assert config.optim.gradient_checkpointing == (mode == "lean")
    assert not config.optim.activation_offloading
    assert "keep" not in config.optim.checkpointing_args


def test_teachers_that_stay_on_the_gpu_are_left_there():
    taught = {**SFT, "rl": "distill", "distill": {"teacher": "t", "teacher_load_in_4bit": True}}
    assert not parsed(taught, memory="lean").optim.reference_offloading
    taught["distill"] = {"teacher": "t"}
    assert parsed(taught, memory="lean").optim.reference_offloading


def test_servers_sample_elsewhere():
    trl = {"reward_funcs": ["r.f"], "use_vllm": True}
    assert not parsed({**GRPO, "trl": trl}, memory="lean").rollout.release_sampler
    config = parsed({**GRPO, "trl": {**trl, "release_sampler": True}})
    assert any("trl.release_sampler: no effect" in notice for notice in config.notices)


def test_another_mode_is_refused():
    with pytest.raises(UserError, match=r"memory: .*lean.*balanced.*fast"):
        parsed(SFT, memory="small")
