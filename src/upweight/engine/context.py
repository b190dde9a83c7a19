"""One row shared by a group of ranks: each holds some of its tokens, and attends with some of the heads to all of them.

Around attention an all-to-all turns [N / ranks tokens, H heads] into [N tokens, H / ranks heads] and back (Ulysses), so
that the tree attention of one rank serves unchanged. All ranks of a group compute the same loss, and each sends back
the gradient of its own scored tokens only: summed over the ranks, it is counted once.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from upweight.engine.attention.interface import Scores, Tree
from upweight.errors import UserError


@dataclass(frozen=True, eq=False)
class Context:
    """The ranks that share this rank's rows, and its place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def summed(self, values: Tensor) -> Tensor:
        """The sum of the ranks' values, without a gradient."""
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def share(self, positions_T: Tensor, length: int) -> "Share":
        """What of these positions in a row of `length` tokens lies in this rank's slice."""
        first = self.rank * -(-length // self.size)
        local_T = positions_T - first
        own_I = ((local_T >= 0) & (local_T < -(-length // self.size))).nonzero()[:, 0]
        return Share(self, len(positions_T), own_I, local_T)


@dataclass(frozen=True, eq=False)
class Share:
    """The positions of a row that a rank computes; one that has none computes its first token, for nothing."""

    context: Context
    total: int
    own_I: Tensor  # which of the positions they are
    local_T: Tensor  # all of them, counted from the start of the slice

    def of(self, values_T: Tensor) -> Tensor:
        """This rank's part of what belongs to the positions."""
        return values_T[self._computed()]

    def positions(self) -> Tensor:
        """Where this rank's positions lie in its slice."""
        found = self.local_T[self._computed()]
        return found if len(self.own_I) else torch.zeros_like(found)

    def joined(self, values_IX: Tensor) -> Tensor:
        """What every rank computed, in the order of the positions, on every rank."""
        if values_IX.dtype == torch.bool:
            return self.joined(values_IX.to(torch.uint8)).bool()
        whole = _Joined.apply(values_IX, self.own_I, self.total, self.context.group)
        assert isinstance(whole, Tensor)
        return whole

    def _computed(self) -> Tensor:
        return self.own_I if len(self.own_I) or not self.total else self.own_I.new_zeros(1)


class SharedTree(Tree):
    """The trees of a row that a group of ranks shares; every rank knows all of it."""

    def __init__(self, end_BN: Tensor, position_BN: Tensor, context: Context) -> None:
        self.context = context
        length = end_BN.shape[1]
        self.missing = -length % context.size
        tail = torch.arange(length, length + self.missing, device=end_BN.device)
        end_BN = torch.cat([end_BN, tail[None] + 1], 1)  # a padding token sees itself alone
        super().__init__(end_BN, F.pad(position_BN, (0, self.missing)))

    def own(self, values_XN: Tensor) -> Tensor:
        """This rank's slice of a row's values, filled up with zeros."""
        padded = F.pad(values_XN, (0, len(self.end_N) - values_XN.shape[-1]))
        return padded.chunk(self.context.size, -1)[self.context.rank].contiguous()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Attention of one layer: this rank's tokens in, all tokens under this rank's heads between, and back."""
        size, group = self.context.size, self.context.group
        require_heads(query.shape[1], size)
        copies = size // math.gcd(size, key.shape[1])  # the fewest that every rank gets as many of
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (_exchanged(x, 1, 2, group) for x in (query, key, value))
        if form.sinks is not None:
            form = dataclasses.replace(form, sinks=form.sinks.chunk(size)[self.context.rank])
        return _exchanged(super().attend(module, query, key, value, form), 2, 1, group)


def require_heads(heads: int, size: int) -> None:
    """Raise where the ranks of a group cannot take as many query heads each."""
    if heads % size:
        fitting = [n for n in range(2, heads + 1) if heads % n == 0]
        raise UserError(
            f"context_parallel_size: {size} ranks cannot share {heads} attention heads evenly; set one of "
            f"{', '.join(map(str, fitting)) or 1}"
        )


def require_shareable(config: PreTrainedConfig, size: int) -> None:
    """Raise where a model's config says that its rows cannot be shared by `size` ranks."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int):
        require_heads(heads, size)


def _exchanged(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank's part of one dimension goes to it, and what all send is joined along another."""
    out = _Exchange.apply(x, split, join, group)
    assert isinstance(out, Tensor)
    return out


def _exchange(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), join)


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose gradient is the one the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = join, split, group
        return _exchange(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        return _exchange(grad_outputs[0], *ctx.back), None, None, None


class _Joined(torch.autograd.Function):
    """Ranks' values put in their places; each gets back the gradient of its own, of which all know the same."""

    @staticmethod
    def forward(ctx: Any, values_IX: Tensor, own_I: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        whole_TX = values_IX.new_zeros(total, *values_IX.shape[1:])
        whole_TX[own_I] = values_IX[: len(own_I)]
        dist.all_reduce(whole_TX, group=group)
        ctx.save_for_backward(own_I)
        ctx.unused = len(values_IX) - len(own_I)
        return whole_TX

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        own = grad_outputs[0][ctx.saved_tensors[0]]
        return torch.cat([own, own.new_zeros(ctx.unused, *own.shape[1:])]), None, None, None
