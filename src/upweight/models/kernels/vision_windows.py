"""Attention of vision towers within images and windows of them: all windows of one length are computed together."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

# To an implementation whose name holds "flash", transformers hands all windows at once, with their bounds; to any other
# it hands one window after the other, which takes a GPU's host longer than the GPU.
NAME = "upweight_flash_windows"


def attend_in_windows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Query, key and value [1, heads, N, width], and the bounds of windows -> [1, N, heads, width]."""
    options = {"dropout_p": dropout, "scale": scaling}
    if cu_seq_lens_q is None:
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, **options)
        return out.transpose(1, 2), None
    bounds = cu_seq_lens_q.tolist()
    starts_by_length: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        starts_by_length.setdefault(end - start, []).append(start)
    if len(starts_by_length) == 1:
        (length,) = starts_by_length
        return _together(query, key, value, length, options).transpose(1, 2), None
    out = torch.empty_like(query)
    for length, starts in starts_by_length.items():
        at = (torch.tensor(starts)[:, None] + torch.arange(length)).flatten().to(query.device)
        q, k, v = (tensor.index_select(2, at) for tensor in (query, key, value))
        out = out.index_copy(2, at, _together(q, k, v, length, options))
    return out.transpose(1, 2), None


def _together(query: Tensor, key: Tensor, value: Tensor, length: int, options: dict[str, Any]) -> Tensor:
    """Attend within windows of one length, laid end to end."""
    query, key, value = (tensor[0].unflatten(1, (-1, length)).transpose(0, 1) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, **options)
    return out.transpose(0, 1).flatten(1, 2)[None]


AttentionInterface.register(NAME, attend_in_windows)


def use_window_attention(tower: PreTrainedModel) -> None:
    """Make a vision tower attend in all windows of a length at once."""
    if tower.config._attn_implementation == NAME:
        return
    for module in tower.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = NAME
