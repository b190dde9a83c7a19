"""Muon for the matrices of a model's layers, and AdamW for all other weights, as one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from upweight.config.sections.training import OptimSection
from upweight.models.adapters.attach import embedding_names
from upweight.models.modules import unwrap_peft

WITH_MUON = "muon"  # marks the groups that Muon steps


class MuonWithAdamW(Optimizer):
    """Steps torch's Muon and AdamW over groups and states that both share with this one, so that one schedule and one
    checkpoint serve both."""

    def __init__(
        self,
        matrices: Iterable[dict[str, Any]],
        others: Iterable[dict[str, Any]],
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        matrices, others = list(matrices), list(others)
        self._parts: list[tuple[bool, Optimizer]] = []
        if matrices:
            self._parts.append((True, Muon(matrices, **muon)))
        if others:
            self._parts.append((False, AdamW(others, **adamw)))
        for is_muon, part in self._parts:
            for group in part.param_groups:
                group[WITH_MUON] = is_muon
        super().__init__([group for _, part in self._parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step both; groups and states may have been replaced by a checkpoint or by other learning rates."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, part in self._parts:
            part.param_groups = [group for group in self.param_groups if group[WITH_MUON] == is_muon]
            part.state = self.state
            part.step()
        return loss


def muon_factory(optim: OptimSection) -> tuple[Any, dict[str, Any]]:
    """Return what transformers builds an optimizer with: a factory, and its arguments by name."""
    arguments = {"lr": optim.learning_rate or 0.0, "weight_decay": optim.weight_decay, "optim": optim}
    return lambda: build_muon, arguments


def build_muon(model: nn.Module, *, lr: float, weight_decay: float, optim: OptimSection) -> MuonWithAdamW:
    """Return the optimizer of a model: Muon for matrices but those of embeddings and head, AdamW for the rest."""
    names = {"embed_tokens", "lm_head", "wte", *embedding_names(unwrap_peft(model))}
    matrices, decayed, plain = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = set(name.split("."))
        if parameter.ndim == 2 and not parts & names and "lora_embedding_" not in name:
            matrices.append(parameter)
        else:
            (decayed if parameter.ndim >= 2 else plain).append(parameter)
    shared = {"lr": lr, "weight_decay": weight_decay}
    others = [{"params": decayed, **shared}, {"params": plain, **shared, "weight_decay": 0.0}]
    muon = {
        "momentum": optim.muon_momentum,
        "nesterov": optim.muon_nesterov,
        "ns_steps": optim.muon_ns_steps,
        "adjust_lr_fn": optim.muon_adjust_lr,
    }
    adamw = {"betas": (optim.adam_beta1, optim.adam_beta2), "eps": optim.adam_epsilon}
    return MuonWithAdamW(
        [{"params": matrices, **shared}] if matrices else [],
        [group for group in others if group["params"]],
        muon | shared,
        adamw | shared,
    )
