"""Asynchronous GRPO with everything on, over two ranks that hold shards, with a stand-in for vLLM."""

import pytest
import yaml

from made_runs import metrics_of, on_ranks, write_model, write_online
from made_vllm import FakeVllm
from upweight.config import load_config
from upweight.train.run import train

EVERYTHING = {
    "use_data_producer": True, "use_vllm": True, "async_prefetch": True, "prefetch_depth": 1, "vllm_sync_interval": 2,
    "vllm_lora_sync": True, "streaming_partial_batch": True, "vllm_importance_sampling_correction": True,
    "off_policy_mask_threshold": 0.5, "importance_sampling_level": "token", "reroll_start_fraction": 0.5,
    "replay_buffer_size": 100, "reward_num_workers": 2, "skip_zero_advantage_batches": True,
}  # fmt: skip
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "gradient_checkpointing": True}
SHARDING = {
    "fsdp": {
        "fsdp": ["full_shard", "auto_wrap"],
        "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "deepspeed": {
        "deepspeed": "deepspeed_configs/zero3_bf16.json",
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def run(file, resume=False):
    train(load_config(file), resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARDING)
def test_sharded_ranks_train_beside_a_server_that_runs_ahead(kind, tmp_path):
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    model = write_model(tmp_path / "model")
    fake = FakeVllm(model)
    keys = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "bf16": False, "save_steps": 2}
    file = write_online(tmp_path, model, **keys, **LORA, **SHARDING[kind])
    content = yaml.safe_load(file.read_text())
    content["trl"] |= {**EVERYTHING, "vllm_server_base_url": fake.url, "vllm_server_timeout": 60}
    file.write_text(yaml.safe_dump(content))
    on_ranks(run, 2, file)
    out = tmp_path / "out"
    (out / "checkpoint-4" / "whole.json").unlink()
    on_ranks(run, 2, file, True)
    fake.close()
    steps = [line for line in metrics_of(out) if "reward_std" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["rollout/lag"] for line in steps) <= 2  # one rollout ahead, synced every other step
    assert (out / "adapter_model.safetensors").exists()
