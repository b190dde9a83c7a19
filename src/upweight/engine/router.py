"""The routers of a mixture of experts: how they share a row's tokens out, and the model's own load-balancing loss."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

LOSS_FUNCTION = "load_balancing_loss_func"  # of transformers' files of mixtures, which all hold a copy of it
_TOGETHER = 1 << 24  # logits of routers that are read at once
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a model: experts x sum over them of (share of choices x mean probability)."""

    top_k: int
    coefficient: float  # of the model's config


def router_loss_of(base: PreTrainedModel) -> RouterLoss | None:
    """Return the load-balancing loss of a language model, or None where transformers has none for it."""
    stock = getattr(sys.modules[type(base).__module__], LOSS_FUNCTION, None)
    top_k = getattr(base, "num_experts_per_tok", None)
    returns_logits = "output_router_logits" in inspect.signature(type(base).forward).parameters
    if stock is None or not isinstance(top_k, int) or not getattr(base, "num_experts", 0) or not returns_logits:
        return None
    # Some files have a loss of their own under this name.
    logits_NX = torch.randn(5, 2 * top_k + 1, generator=torch.Generator().manual_seed(0))
    try:
        theirs = stock((logits_NX, -logits_NX), logits_NX.shape[1], top_k)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    ours = router_statistics((logits_NX, -logits_NX), torch.ones(5), top_k)
    share = balance_loss(ours["router_load_LX"], ours["router_prob_LX"], torch.tensor(5.0))
    if not torch.allclose(torch.as_tensor(theirs, dtype=torch.float32), share, atol=1e-4):
        return None
    config = base.config.get_text_config()
    named = [float(getattr(config, name) or 0) for name in _COEFFICIENTS if hasattr(config, name)]
    return RouterLoss(top_k, named[0] if named else 0.0)


def router_statistics(logits: Sequence[Tensor], weight_N: Tensor, top_k: int) -> dict[str, Tensor]:
    """Return sums over a row's tokens, each counted `weight_N` times, by layer and expert, from the routers' logits."""
    # Several layers at once, since short rows take as long as their launches; not all, since long rows need room.
    together = max(1, _TOGETHER // max(1, logits[0].numel()))
    groups = [logits[start : start + together] for start in range(0, len(logits), together)]
    parts = [_layer_statistics(torch.stack(list(group)).flatten(1, -2), weight_N, top_k) for group in groups]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _layer_statistics(logits_LNX: Tensor, weight_N: Tensor, top_k: int) -> dict[str, Tensor]:
    layers, _, experts = logits_LNX.shape
    log_prob_LNX = logits_LNX.float().log_softmax(-1)
    prob_LNX = log_prob_LNX.exp()
    chosen_LNK = prob_LNX.detach().topk(top_k, dim=-1).indices
    chosen_LNK += experts * torch.arange(layers, device=chosen_LNK.device)[:, None, None]
    load_LX = weight_N.new_zeros(layers * experts)
    load_LX.index_add_(0, chosen_LNK.flatten(), weight_N[:, None].expand(chosen_LNK.shape).flatten())
    entropy_LN = -(prob_LNX * log_prob_LNX).detach().sum(-1)
    return {
        "router_load_LX": load_LX.view(layers, experts),
        # Not a matrix product, which might be rounded as TF32.
        "router_prob_LX": (weight_N[:, None] * prob_LNX).sum(1),
        "router_entropy_L": (weight_N * entropy_LN).sum(1),
    }


def balance_loss(load_LX: Tensor, prob_LX: Tensor, tokens: Tensor) -> Tensor:
    """Return the load-balancing loss of the tokens that both are sums over; of a part, given the sum of `prob_LX`."""
    layers, experts = load_LX.shape
    share_X, mean_X = load_LX.sum(0) / (layers * tokens), prob_LX.sum(0) / (layers * tokens)
    return experts * (share_X * mean_X).sum()
