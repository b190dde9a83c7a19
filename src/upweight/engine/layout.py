"""The layout of an architecture: rows of prefix trees, or padded rows where prefixes cannot be shared."""

from typing import Literal

from transformers import PreTrainedConfig, PreTrainedModel

from upweight.engine.attention.interface import register, stock_of
from upweight.engine.packing import Layout
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.models.patches import keep_soft_cap, scale_rope_by_row_length
from upweight.models.vision import vision_family

_KIND_FIELDS = ("layer_types", "layers_block_type", "block_types")
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}
_ONLY_WITH_DROPOUT = {"reformer"}  # gradients in training mode alone, where no two forwards can be compared
_READS_MASK = {"doge"}  # model code that computes with the mask cannot take a rule in its place


def why_not_trees(base: PreTrainedModel, longest: int | None = None, *, reads_images: bool = False) -> str | None:
    """Return why this architecture cannot share prefixes of sequences with `longest` tokens, or None when it can."""
    config, family = base.config.get_text_config(), vision_family(base.config)
    if reads_images and family is not None and family.sees_whole_image:
        return "tokens of an image see each other in both directions"
    kinds = {kind for name in _KIND_FIELDS for kind in getattr(config, name, None) or ()}
    if mixing := sorted(kinds - _ATTENTION_KINDS):
        return f"it has layers of kind {', '.join(mixing)}, which mix tokens outside attention"
    if base._is_stateful:
        return "it carries a recurrent state"
    if not base._supports_attention_backend:
        return "its attention is not behind transformers' attention interface"
    if config.model_type in _READS_MASK or hasattr(config, "index_topk"):
        return "its attention computes with the mask itself"
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        return "its attention is not causal"
    embeddings = (module for name, module in base.named_modules() if name.endswith("position_embeddings"))
    if any(getattr(module, "padding_idx", None) is not None for module in embeddings):
        return "it counts positions from its padding token's id"
    limit = scaled_beyond(config)
    if limit is not None and (longest is None or longest > limit):
        return f"its rotary embedding changes beyond {limit} tokens (set a sequence length of at most that)"
    return None


def scaled_beyond(config: PreTrainedConfig) -> int | None:
    """Return the sequence length beyond which rotary embeddings depend on that length; None where they never do."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    limits = [
        rope.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or text.max_position_embeddings
        for rope in ([ropes] if "rope_type" in ropes else [r for r in ropes.values() if isinstance(r, dict)])
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def choose_layout(
    base: PreTrainedModel,
    layout: Literal["auto", "tree", "padded"],
    longest: int | None,
    *,
    reads_images: bool = False,
) -> Layout:
    """Choose the layout, prepare the model's attention for it, and warn when prefixes are not shared."""
    if base.config.is_encoder_decoder:
        raise UserError(f"{type(base).__name__} is an encoder-decoder: only decoder models can be trained")
    if base.config.model_type in _ONLY_WITH_DROPOUT:
        raise UserError(
            f"{type(base).__name__} computes gradients only with dropout, so the first batch cannot be compared with "
            "the model's own forward: name another model, such as a Llama or Qwen"
        )
    keep_soft_cap(base)
    stock = stock_of(base.config.get_text_config()._attn_implementation or "eager")
    reason = (
        why_not_trees(base, longest, reads_images=reads_images) if layout != "padded" else "the settings ask for it"
    )
    if reason is not None:
        if layout == "tree":
            raise UserError(f"{type(base).__name__} cannot share prefixes: {reason}. Set `layout: auto`.")
        logger.warning("%s: rows are padded, prefixes are not shared: %s", type(base).__name__, reason)
        if scaled_beyond(base.config) is not None:
            scale_rope_by_row_length(base)
        return "padded"
    for name in ("attention_dropout", "attn_pdrop", "attn_dropout"):
        if getattr(base.config.get_text_config(), name, None):
            warn_once(f"{name} of {type(base).__name__} is not applied: branches share the attention of their prefix")
    base.set_attn_implementation(register(stock))
    return "tree"
