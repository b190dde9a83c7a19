"""Combinations of keys that Axolotl's examples for vision-language models use: each is accepted, or refused by name."""

import re
from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.errors import UserError

ROWS = {"path": "rows", "type": "chat_template", "split": "train[:1%]", "field_messages": "messages"}
EXAMPLE = {
    "base_model": "some/vlm", "processor_type": "AutoProcessor", "skip_prepare_dataset": True, "datasets": [ROWS],
    "remove_unused_columns": False, "sample_packing": False, "dataset_prepared_path": "prepared", "val_set_size": 0.0,
    "output_dir": "out", "sequence_len": 2048, "pad_to_sequence_len": False, "micro_batch_size": 1,
    "gradient_accumulation_steps": 4, "num_epochs": 1, "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine",
    "learning_rate": 2e-4, "bf16": "auto", "tf32": True, "gradient_checkpointing": True, "logging_steps": 1,
    "flash_attention": True, "warmup_ratio": 0.1, "evals_per_epoch": 1, "saves_per_epoch": 1, "weight_decay": 0.0,
    "strict": False,
}  # fmt: skip
# Axolotl's way to leave the vision tower alone: a pattern of the names of the language model's layers.
PATTERN = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
LORA = {"adapter": "lora", "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": PATTERN}
PLUGINS = ["cut_cross_entropy.CutCrossEntropyPlugin", "liger.LigerPlugin"]
SHARDS = {
    "offload_params": False, "cpu_ram_efficient_loading": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "Qwen3VLTextDecoderLayer", "state_dict_type": "FULL_STATE_DICT",
    "reshard_after_forward": True,
}  # fmt: skip
SPOKEN = {"path": "rows", "type": "chat_template", "field_messages": "conversations", "roles_to_train": ["assistant"]}
TEXTS = {"path": "rows", "type": "multimodal_pretrain"}
ACCEPTED = {
    "lora": LORA,
    "named layers": {**LORA, "lora_target_modules": ["q_proj", "v_proj"], "ddp_find_unused_parameters": True},
    "qlora": {**LORA, "adapter": "qlora", "load_in_4bit": True, "lora_dropout": 0},
    "8 bits": {**LORA, "load_in_8bit": True},
    "language model alone": {"freeze_mm_modules": True},
    "kernels": {
        **LORA, "plugins": [f"axolotl.integrations.{name}" for name in PLUGINS], "cut_cross_entropy": True,
        "liger_glu_activation": True, "liger_layer_norm": True, "lora_mlp_kernel": True, "lora_qkv_kernel": True,
    },
    "ends of turns": {**LORA, "chat_template": "gemma4", "eot_tokens": ["<turn|>"]},
    "packed": {**LORA, "sample_packing": True, "eval_sample_packing": False, "skip_prepare_dataset": False},
    "shards": {**LORA, "fsdp_version": 2, "fsdp_config": SHARDS, "optimizer": "adamw_torch_8bit"},
    "zero": {**LORA, "deepspeed": "deepspeed_configs/zero3_bf16.json"},
    "turns by other names": {
        "datasets": [{**SPOKEN, "message_property_mappings": {"role": "from", "content": "value"}}], **LORA,
    },
    "processor": {"processor_type": "Qwen2VLProcessor", "processor_kwargs": {"size": {"longest_edge": 512}}},
    "multimodal": {**LORA, "is_multimodal": True},
    "texts": {"datasets": [{**TEXTS, "text_column": "caption", "image_column": "images", "image_token": "<image>"}]},
    **{
        name: {**LORA, "chat_template": name}
        for name in (
            "qwen2_vl", "qwen3_5", "gemma3", "gemma3n", "gemma4", "llama3_2_vision", "llama4", "pixtral",
            "mistral_v7_tekken", "llava", "tokenizer_default",
        )
    },
}  # fmt: skip
REFUSED = {
    "a size": ({**LORA, "image_size": 512}, ["image_size: .*`processor_kwargs`"]),
    "a way of resizing": ({"image_resize_algorithm": "bilinear"}, ["image_resize_algorithm: .*`processor_kwargs`"]),
    "marks of roles": (
        {"role_boundaries": [{"role": "user", "start": "<u>"}]},
        ["role_boundaries: .*`roles_to_train`"],
    ),
    "8 bits of shards": ({**LORA, "fsdp_version": 2, "fsdp_config": SHARDS}, ["optimizer: .*'adamw_torch_8bit'"]),
    "texts of other columns": (
        {"datasets": [{**TEXTS, "image_column": "photo", "image_token": "<|pic|>", "image_base_dir": "photos"}]},
        ["image_column: .*rename yours", "image_token: write <image>", "image_base_dir: .*beside the data"],
    ),
    "an unknown template": ({**LORA, "chat_template": "lfm2_vl"}, ["chat_template: there is no 'lfm2_vl'"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_examples_combine_is_accepted(name):
    config = parse_config({**EXAMPLE, **ACCEPTED[name]}, folder=Path())
    assert config.model.processor_class == ACCEPTED[name].get("processor_type", "AutoProcessor")
    if name == "texts":
        assert (config.data.datasets[0].type, config.data.datasets[0].field) == ("completion", "caption")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_key_and_the_remedy(name):
    keys, messages = REFUSED[name]
    with pytest.raises(UserError) as caught:
        parse_config({**EXAMPLE, **keys}, folder=Path())
    found = str(caught.value).splitlines()
    assert len(found) == len(messages)
    for line, message in zip(found, messages, strict=True):
        assert re.search(message, line), line
