"""Tiny random models of every causal language model that transformers knows, from configs made in code."""

import functools
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 89
LAYERS = 2
# What configs call their sizes; each gets those it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "embedding_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "n_inner": 48,
    "dim_ff": 48,
    "dff": 48,
    "num_hidden_layers": LAYERS,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "num_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_layers": LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 6,
    "sliding_window": 7,
    "attention_chunk_size": 7,
    "state_size": 4,
    "is_decoder": True,
}
_MLA = {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXTRAS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        _MLA,
    ),
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 7,
        "d_rel": 4,
        "rel_extent": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    "kimi_linear": {"num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 16),
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "attn_layers": ["local", "local"],
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 8,
        "shape_vocab_size": VOCABULARY,
        "concat_input": False,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "hrm_text": {"H_cycles": 2, "L_cycles": 2},
}
# Halves and wholes of larger models whose text model is swept under its own type, or that read more than tokens.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        (
            "emu3",
            "fuyu",
            "gemma3",
            "gemma3n",
            "gemma4",
            "gemma4_unified",
            "git",
            "got_ocr2",
            "llama4",
            "mllama",
            "moss_transcribe_diarize",
            "phi4_multimodal",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen4_exp",
            "blt",
        ),
        "reads more than tokens, or is a whole around a text model",
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody", "moshi"), "writes sound in several streams of tokens"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model"),
}


def kinds() -> list[str]:
    """The model types of all causal language models."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(LEFT_OUT))


@functools.cache
def _known(kind: str) -> frozenset[str]:
    """The keys that a config has, by all their names."""
    config = CONFIG_MAPPING[kind]()
    return frozenset(config.to_dict()) | frozenset(config.attribute_map)


def tiny_config(kind: str, **changes: Any) -> Any:
    """A small config of one model type."""
    known = _known(kind)
    small = {name: value for name, value in SIZES.items() if name in known}
    return CONFIG_MAPPING[kind](**{**small, **EXTRAS.get(kind, {}), **changes})


def tiny_model(kind: str, **changes: Any) -> Any:
    """A float32 model of one type, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "A_log" not in name and weight.std() < 0.1:
                weight.mul_(0.2 / weight.std().clamp(min=1e-4))
    return model
