"""NEFTune: uniform noise on the embeddings while training."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from upweight.engine.attention.interface import Tree, current_tree
from upweight.engine.forward import base_of, body_of


def add_noise(model: nn.Module, alpha: float) -> None:
    """Add noise within `alpha` / sqrt(length of the sequence x width) to embeddings in training mode from now on.

    The hook of transformers would use the length of the row, so that noise would shrink with what is packed beside it.
    """
    base = base_of(model)
    size_BN = torch.zeros(0)

    def measure(body: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal size_BN
        if body.training and isinstance(tree := current_tree(), Tree):
            size_BN = tree.local(longest_through(tree.end_N, tree.position_N))[None]
        elif body.training:
            size_BN = kwargs["attention_mask"].sum(1, keepdim=True)

    def disturb(module: nn.Module, args: Any, embedded_BND: Tensor) -> Tensor:
        if not module.training:
            return embedded_BND
        bound_BN = alpha / math.sqrt(embedded_BND.shape[-1]) / size_BN.sqrt()
        return embedded_BND + torch.empty_like(embedded_BND).uniform_(-1, 1) * bound_BN[..., None].to(embedded_BND)

    body_of(base).register_forward_pre_hook(measure, with_kwargs=True)
    base.get_input_embeddings().register_forward_hook(disturb)


def longest_through(end_N: Tensor, position_N: Tensor) -> Tensor:
    """Return the length of the longest sequence that each token of a tree belongs to."""
    start_N = torch.arange(len(end_N), device=end_N.device)
    level_N = (end_N - start_N).double().log2().long()
    tables, width = [position_N + 1], 1  # the largest of the 1, 2, 4, ... that begin at each token
    while 2 * width <= len(end_N):
        below = tables[-1]
        tables.append(torch.cat([torch.maximum(below[:-width], below[width:]), below[-width:]]))
        width *= 2
    table_LN = torch.stack(tables)
    return torch.maximum(table_LN[level_N, start_N], table_LN[level_N, end_N - 2**level_N])
