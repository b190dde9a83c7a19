"""Gated blocks of long rows in tiles of tokens: what they hold inside does not grow with the row.

A block is four to six times as wide as what goes in and out of it, so in the backward of a long row it needs more
memory than attention. Each tile is computed in the backward of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from upweight.models.kernels.recompute import Recomputed, Rerun, draws, note_output, read_weights
from upweight.models.modules import wrap_forward

TILE = 2048  # tokens, enough for matrix products at full speed
GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})  # projections of a block


def tile_blocks(model: nn.Module, above: int) -> bool:
    """Compute gated blocks in tiles where a row has more than `above` tokens; return whether the model has any."""
    blocks = [module for module in model.modules() if is_gated_block(module)]
    for block in blocks:
        wrap_forward(block, _tiled_forward)
        vars(block)["_tile_above"] = max(above, TILE)
    return bool(blocks)


def are_tiled(model: nn.Module) -> bool:
    """Return whether `tile_blocks` was called for a model that has gated blocks."""
    return any("_tile_above" in vars(module) for module in model.modules())


def is_gated_block(module: nn.Module) -> bool:
    """Return whether a module has the projections of a gated block, each of one weight, and computes token by token."""
    projections: dict[str, Any] = {name: child for name, child in module.named_children() if name.endswith("_proj")}
    if set(projections) not in GATED or not all(hasattr(child, "in_features") for child in projections.values()):
        return False
    down = projections.pop("down_proj")
    return {down.out_features} == {child.in_features for child in projections.values()}


def _tiled_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the block on tiles of a long row; with gradients, keep nothing but its input."""
    block, above = vars(self)["_stock_forward"], vars(self)["_tile_above"]
    x_ND = x.reshape(-1, x.shape[-1])
    if args or kwargs or len(x_ND) <= above:
        return block(x, *args, **kwargs)
    if not torch.is_grad_enabled():
        out_ND = torch.cat([block(tile) for tile in x_ND.split(TILE)])
    elif draws(self):
        out_ND = torch.cat([checkpoint(block, tile, use_reentrant=False) for tile in x_ND.split(TILE)])
    else:
        out_ND = Recomputed.apply(Rerun(self, block), TILE, x_ND, *read_weights(self))
        assert isinstance(out_ND, Tensor)
        note_output(self, out_ND)
    return out_ND.view(*x.shape[:-1], -1)
