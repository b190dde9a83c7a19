"""Tiny random models of every type that transformers knows, from configs made in code."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf

from tiny_models import VOCABULARY

LAYERS = 2
MOST_WEIGHTS = 8_000_000
_SPREAD = 0.15  # of random weights: large enough for attention to matter


def _each(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(" ".join(names).split(), value)


# What configs call their sizes; each gets those it knows.
SIZES: dict[str, Any] = {
    **_each(VOCABULARY, "vocab_size text_vocab_size vocab_size_per_layer_input"),
    **_each(32, "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size embedding_dim word_embed_proj_dim"),
    **_each(32, "rnn_hidden_size attention_hidden_size lru_width dim_model"),
    **_each(48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_inner ffn_hidden_size dff"),
    **_each(48, "intermediate_size_mlp d_ff dim_ff feed_forward_proj_dim"),
    **_each(LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    **_each(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_each(2, "num_key_value_heads num_kv_heads linear_num_key_heads"),
    **_each(8, "head_dim attention_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_kv"),
    **_each(8, "linear_key_head_dim linear_value_head_dim rotary_dim index_head_dim mamba_d_state mamba_headdim"),
    **_each(8, "mamba_n_heads mamba_num_heads mamba_d_head query_pre_attn_scalar hidden_size_per_layer_input"),
    **_each(4, "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads floor_scale"),
    **_each(4, "state_size local_attention"),
    **_each(2, "num_experts_per_tok moe_topk moe_top_k moe_k num_experts_per_token top_k_experts"),
    **_each(1, "n_group topk_group num_expert_group mamba_n_groups n_groups first_k_dense_replace"),
    **_each(16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    **_each(16, "kv_lora_rank q_lora_rank"),
    **_each(256, "max_position_embeddings n_positions n_ctx max_seq_len seq_length"),
    **_each(5, "sliding_window attention_window_size window_size sliding_window_size"),
    "encoder_hash_byte_group_vocab": 64,
    "hidden_size_global": 64,
    "index_n_heads": 32,
    "index_topk": 8,
    "attention_chunk_size": 6,
    "sep_token_id": 2,
    "cls_token_id": 1,
}
ALWAYS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers")
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
# What a type needs besides to be built, or to show what it can do.
EXTRAS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": VOCABULARY},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
    "gemma3n_text": {
        **_SHARED_LAYERS,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {**_SHARED_LAYERS, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"H_cycles": 2, "L_cycles": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 32,
        "n_shared_experts": 1,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "llama4_text": {"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "use_qk_norm": False},
    "luke": {"entity_vocab_size": 8},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "perceiver": {"num_latents": 8, "d_latents": 32},
    "phimoe": {"original_max_position_embeddings": 16},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (16, 16),
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "attn_layers": ["local", "local"],
        "is_decoder": True,
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
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_config(config_class: Any, **given: Any) -> Any:
    """A small config of a class: its own defaults and what is given, every size that is known by name made small."""
    config: Any = config_class(**given)
    if config.model_type in EXTRAS or not any(True for _ in _parts(config)):
        return config_class(**_changes(config), **given)
    _shrink(config)
    return config


def _parts(config: Any) -> Iterator[Any]:
    """The configs inside a config."""
    found = (getattr(config, name, None) for name in config.sub_configs)
    return (part for part in found if isinstance(part, hf.PreTrainedConfig))


def _shrink(config: Any) -> None:
    """Make a config small in place, and the configs inside it."""
    for name, value in _changes(config).items():
        if _has(config, name):
            setattr(config, name, value)
    for part in _parts(config):
        _shrink(part)


def _changes(config: Any) -> dict[str, Any]:
    """What makes a config small: the sizes that it knows, and one layer of each kind."""
    changes = {name: value for name, value in SIZES.items() if _has(config, name)}
    if "kv_lora_rank" in changes:
        changes |= {"num_key_value_heads": changes["num_attention_heads"], "head_dim": SIZES["qk_rope_head_dim"]}
    extras = EXTRAS.get(config.model_type, {})
    layers = (changes | extras).get("num_hidden_layers", LAYERS)
    for name in PATTERNS:
        if isinstance(pattern := getattr(config, name, None), list):
            changes[name] = (list(dict.fromkeys(pattern)) * layers)[:layers]
    for name in list(changes):
        if isinstance(getattr(type(config), config.attribute_map.get(name, name), None), property):
            del changes[name]
    return changes | ALWAYS | extras


def _has(config: Any, name: str) -> bool:
    """Whether a config has a size of this name that is not left to be derived."""
    try:
        return getattr(config, name, None) is not None
    except Exception:  # some fields are read by layer only
        return True


def tiny_model(auto: Any, config_class: Any, **given: Any) -> hf.PreTrainedModel:
    """A float32 model of the class that an auto class has for a config; the same weights every time."""
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(tiny_config(config_class, **given)).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size:,} weights with every size made small that is known by name")
    torch.manual_seed(0)
    model = auto.from_config(tiny_config(config_class, **given)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "A_log" not in name and 0 < (spread := float(weight.std())) < _SPREAD / 2:
                weight.mul_(_SPREAD / spread)
            elif weight.ndim == 1 and name.endswith(("bias", "sinks")):
                weight.normal_(std=0.3)
    return model
