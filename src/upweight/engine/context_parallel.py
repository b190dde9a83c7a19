"""Context parallelism (Ulysses): the ranks of a group share one row, and each holds a slice of its tokens.

Around attention an all-to-all turns [N / ranks tokens, H heads] into [N tokens, H / ranks heads] and back, so that tree
attention runs as on a single rank. All ranks of a group compute the same loss, and each backpropagates only the
gradient of its local scored tokens: summed over the ranks, every token is counted once.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from upweight.engine.attention.interface import AttentionParams, Tree
from upweight.errors import UserError


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The context parallel group of this rank, and its rank and size in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def slice(self, values_BN: Tensor) -> Tensor:
        """Return this rank's slice of a row's values, padded with zeros."""
        padded = F.pad(values_BN, (0, -values_BN.shape[-1] % self.size))
        return padded.chunk(self.size, -1)[self.rank].contiguous()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks; each rank gets the gradient of its own."""
        return cast(Tensor, _SumRanks.apply(values, self.group))

    def shard(self, positions_T: Tensor, length: int) -> "PositionShard":
        """Return which of these positions in a row of `length` tokens lie in this rank's slice."""
        slice_length = -(-length // self.size)
        offset_T = positions_T - self.rank * slice_length
        local_I = ((offset_T >= 0) & (offset_T < slice_length)).nonzero()[:, 0]
        if len(local_I) or not len(positions_T):
            return PositionShard(self.group, len(positions_T), local_I, local_I, offset_T[local_I])
        first_I = local_I.new_zeros(1)
        return PositionShard(self.group, len(positions_T), local_I, first_I, first_I)


@dataclass(frozen=True, eq=False)
class PositionShard:
    """The positions of a row that a rank computes; a rank without any computes its first token and drops it."""

    group: dist.ProcessGroup
    total: int
    local_I: Tensor  # indices of this rank's positions among all positions
    computed_I: Tensor  # the same, or the index of any position for a rank without positions
    offset_I: Tensor  # the computed positions, counted from the start of the slice

    def gather(self, values_IX: Tensor) -> Tensor:
        """Return the values of all ranks, in the order of the positions, on every rank."""
        if values_IX.dtype == torch.bool:
            return self.gather(values_IX.to(torch.uint8)).bool()
        return cast(Tensor, _GatherPositions.apply(values_IX, self.local_I, self.total, self.group))


class ShardedTree(Tree):
    """The trees of a row that a group of ranks shares; every rank has the ends and positions of the whole row."""

    def __init__(self, end_BN: Tensor, position_BN: Tensor, context: ContextGroup) -> None:
        self.context = context
        length = end_BN.shape[1]
        missing = -length % context.size
        tail = torch.arange(length, length + missing, device=end_BN.device)
        end_BN = torch.cat([end_BN, tail[None] + 1], 1)  # a padding token sees only itself
        super().__init__(end_BN, F.pad(position_BN, (0, missing)))

    def local(self, values_XN: Tensor) -> Tensor:
        """Return this rank's slice of a row's values, padded with zeros."""
        return self.context.slice(values_XN)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute the attention of this rank's tokens, by attention of all tokens under this rank's heads."""
        size, group = self.context.size, self.context.group
        require_heads(query.shape[1], size)
        copies = size // math.gcd(size, key.shape[1])  # the fewest that divide evenly among the ranks
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (cast(Tensor, _AllToAll.apply(x, 1, 2, group)) for x in (query, key, value))
        if params.sinks is not None:
            params = dataclasses.replace(params, sinks=params.sinks.chunk(size)[self.context.rank])
        return cast(Tensor, _AllToAll.apply(super().attend(module, query, key, value, params), 2, 1, group))


def require_heads(heads: object, size: int) -> None:
    """Raise where the query heads, if their number is known, do not divide evenly among the ranks of a group."""
    if isinstance(heads, int) and heads % size:
        divisors = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0)
        problem = f"{size} ranks cannot share {heads} attention heads evenly"
        raise UserError(f"context_parallel_size: {problem}; set one of {divisors or 1}")


def require_shareable(config: PreTrainedConfig, size: int) -> None:
    """Raise where a model's config does not allow `size` ranks to share a row."""
    require_heads(getattr(config.get_text_config(), "num_attention_heads", None), size)


class _AllToAll(torch.autograd.Function):
    """Splits one dimension over the ranks and joins what they send along another; backward is the reverse of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = join, split, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        return _AllToAll.apply(grad_outputs[0], *ctx.back), None, None, None


class _SumRanks(torch.autograd.Function):
    """Sums the ranks' values; the gradient, which is the same on all ranks, goes back to each rank's own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return grad_outputs[0], None


class _GatherPositions(torch.autograd.Function):
    """Gathers the ranks' values; each rank gets the gradient of its values, which is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, values_IX: Tensor, local_I: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        whole_TX = values_IX.new_zeros(total, *values_IX.shape[1:])
        whole_TX[local_I] = values_IX[: len(local_I)]
        dist.all_reduce(whole_TX, group=group)
        ctx.save_for_backward(local_I)
        ctx.unused = len(values_IX) - len(local_I)
        return whole_TX

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad_IX = grad_outputs[0][ctx.saved_tensors[0]]
        return torch.cat([grad_IX, grad_IX.new_zeros(ctx.unused, *grad_IX.shape[1:])]), None, None, None
