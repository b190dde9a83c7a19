"""A tiny Llama as a GGUF file."""

from pathlib import Path
from typing import Any

LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_gguf(model: Any, file: Path) -> None:
    """The weights of a tiny Llama whose head is not tied, in float32."""
    import gguf

    weights = model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(model.config.num_hidden_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(weights["model.embed_tokens.weight"]))
    numbers = range(model.config.num_hidden_layers)
    layers = {f"blk.{n}.{short}": f"model.layers.{n}.{long}" for n in numbers for short, long in LAYER.items()}
    for short, long in {**OUTER, **layers}.items():
        writer.add_tensor(f"{short}.weight", weights[f"{long}.weight"].numpy())
    for finish in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        finish()
