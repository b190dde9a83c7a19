"""Tiny random models built in code, their plain per-sequence forward, and the sequences that engine tests share."""

import numpy as np
import torch
import transformers as hf

from upweight.types import Sample, Unit

VOCABULARY = 89
WINDOW = 5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXTRAS = {
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "olmo2": {},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": 6,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "moe_layers": [],
        "use_qk_norm": False,
    },
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3},
    "cohere": {"logit_scale": 0.25},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "starcoder2": {},
    "seed_oss": {"head_dim": 8},
    "phi": {},
    "modernbert-decoder": {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "qwen3_next": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mamba": {"state_size": 4},
}
TREES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "qwen3_moe")
TREES_TOO = ("gpt_oss", "llama4_text", "granite", "cohere", "phi")
PADDED = ("qwen3_next", "mamba")


def tiny(kind: str, auto=hf.AutoModelForCausalLM, **changes):
    """A float32 model of one architecture, with weights large enough for attention to matter."""
    config = hf.AutoConfig.for_model(kind, **{**SIZES, **_EXTRAS[kind], **changes})
    torch.manual_seed(0)
    # transformers before 5.21 gives Gemma 2 an SDPA that drops its soft cap
    attention = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    model = auto.from_config(config, **attention).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "A_log" not in name:
                weight.mul_(12.0)
            elif weight.ndim == 1 and ("bias" in name or "sinks" in name):
                weight.normal_()
    return model


def drawn(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length)


def sample(*parts: np.ndarray, prompt: int) -> Sample:
    """Parts end to end; everything from `prompt` on is scored."""
    ids = np.concatenate(parts).astype(np.int64)
    return Sample(ids=ids, loss_mask=np.arange(len(ids)) >= prompt)


def pair() -> list[Unit]:
    prompt = drawn(1, 9)
    return [Unit(tuple(sample(prompt, drawn(seed, size), prompt=9) for seed, size in ((2, 6), (3, 4))))]


def group(prompt: int = 11, sizes: tuple[int, ...] = (7, 1, 5, 5)) -> list[Unit]:
    shared = drawn(4, prompt)
    return [Unit((sample(shared, drawn(10 + n, size), prompt=prompt),)) for n, size in enumerate(sizes)]


def three_levels() -> list[Unit]:
    """A prompt whose first turn branches again: prompt -> a -> {b, c}, prompt -> d; and a second, separate tree."""
    prompt, turn = drawn(20, 6), drawn(21, 8)
    tails = [drawn(22 + n, 3 + n) for n in range(3)]
    nested = [sample(prompt, turn, tails[0], prompt=6), sample(prompt, turn, tails[1], prompt=14)]
    return [Unit((item,)) for item in [*nested, sample(prompt, tails[2], prompt=6)]] + group(5, (4, 2))


def empty_prompts() -> list[Unit]:
    return [Unit((sample(drawn(30 + n, size), prompt=0),)) for n, size in enumerate((6, 2, 9))]


def identical() -> list[Unit]:
    prompt, tail = drawn(40, 7), drawn(41, 5)
    return [Unit((sample(prompt, tail, prompt=7),)) for _ in range(3)] + [Unit((sample(prompt, tail[:2], prompt=7),))]


def staircase() -> list[Unit]:
    """Branches off one trunk every token or two, so that a window reaches over several short ancestors."""
    trunk = drawn(50, 12)
    cuts = (4, 5, 7, 8, 10, 12)
    return [Unit((sample(trunk[:cut], drawn(51 + n, 3), prompt=2),)) for n, cut in enumerate(cuts)]


SHAPES = {f.__name__: f for f in (pair, group, three_levels, empty_prompts, identical, staircase)}


def plain_statistics(model, units: list[Unit]) -> dict[str, torch.Tensor]:
    """Log-probs and entropies of the scored tokens, each sequence forwarded alone by the model's own forward."""
    logps, entropy = [], []
    for item in (item for unit in units for item in unit.samples):
        at = torch.from_numpy(np.flatnonzero(item.loss_mask)).to(model.device)
        at = at[at > 0]
        ids = torch.from_numpy(item.ids).to(model.device)
        log_p = model(input_ids=ids[None], use_cache=False).logits[0, at - 1].float().log_softmax(-1)
        logps.append(log_p.gather(1, ids[at][:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
    return {"logps_T": torch.cat(logps), "entropy_T": torch.cat(entropy)}


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Backward, and every trained weight's gradient; the model is left without."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    model.zero_grad(set_to_none=True)
    return found


def weighted(out: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that treats every token differently."""
    generator = torch.Generator().manual_seed(5)
    return sum((v * torch.randn(v.shape, generator=generator)).sum() for _, v in sorted(out.items()))  # pyright: ignore


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between gradients, relative to the largest gradient."""
    assert a.keys() == b.keys()
    largest = max(float(g.abs().max()) for g in b.values())
    assert largest > 0
    return max(float((a[n] - b[n]).abs().max()) for n in a) / largest
