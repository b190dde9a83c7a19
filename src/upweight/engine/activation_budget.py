"""Gradient checkpointing of only as many layers as memory requires; the others keep their activations."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

from upweight.log import logger
from upweight.models.memory import training_bytes

FRACTION = 0.5  # of the memory that is free at the first training forward, for activations that are kept


class ActivationBudget:
    """Decides before each training forward how many of the checkpointed layers keep their activations.

    The last layers keep theirs, because backward frees them before it recomputes the first of the other layers. The
    bytes that a layer keeps per token are measured on the last layer in the first forward, for any architecture.
    """

    def __init__(self, layers: Sequence[GradientCheckpointingLayer], reserved: int) -> None:
        """`reserved`: bytes that the first step will still allocate for gradients and the optimizer."""
        self.layers = list(layers)
        self.reserved = reserved
        self.bytes_for_token: float | None = None
        self.budget = 0.0

    def choose(self, tokens: int) -> int:
        """Set which layers recompute in a forward of so many tokens; return how many keep their activations."""
        device = next(self.layers[0].parameters()).device
        if not (torch.is_grad_enabled() and self.layers[0].training):
            return 0
        # Recomputing under FSDP gathers weights again, and ranks must do that equally often.
        if device.type != "cuda" or isinstance(self.layers[0], FSDPModule):
            return 0
        if self.bytes_for_token is None:
            self.budget = FRACTION * (_free_bytes(device) - self.reserved)
            count = 1
            self._measure(self.layers[-1], tokens, device)
        else:
            free = min(self.budget, FRACTION * _free_bytes(device))
            count = layers_that_fit(free, self.bytes_for_token * tokens, len(self.layers))
        self.apply(count)
        return count

    def apply(self, count: int) -> None:
        """Let the last `count` layers keep their activations."""
        first_kept = len(self.layers) - count
        for number, layer in enumerate(self.layers):
            layer.gradient_checkpointing = number < first_kept

    def _measure(self, layer: nn.Module, tokens: int, device: torch.device) -> None:
        """Measure how much memory the next forward of one layer leaves allocated."""
        before: list[int] = []

        def enter(*_: object) -> None:
            before.append(torch.cuda.memory_allocated(device))

        def leave(*_: object) -> None:
            self.bytes_for_token = max(1, torch.cuda.memory_allocated(device) - before[0]) / tokens
            count = layers_that_fit(self.budget, self.bytes_for_token * tokens, len(self.layers))
            logger.info(
                "gradient checkpointing: rows of %d tokens keep the activations of %d of %d layers, %.1f GiB; "
                "'gradient_checkpointing_kwargs: {every_layer: true}' recomputes all",
                tokens, count, len(self.layers), count * self.bytes_for_token * tokens / 2**30,
            )  # fmt: skip
            for handle in handles:
                handle.remove()

        handles = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]


def layers_that_fit(budget: float, layer_bytes: float, layers: int) -> int:
    """Return how many layers fit into `budget` bytes: all, or two fewer, which leaves space to recompute another."""
    count = int(budget // layer_bytes)
    return layers if count >= layers else max(0, count - 2)


def _free_bytes(device: torch.device) -> float:
    """Return the bytes that this process can still allocate."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def recompute_every_layer(base: nn.Module) -> None:
    """Recompute every layer from now on, after memory ran out."""
    budget: ActivationBudget | None = base.__dict__.get("_activation_budget")
    if budget is not None:
        budget.apply(0)
        base.__dict__["_activation_budget"] = None


def activation_budget(base: nn.Module, optimizer: str) -> ActivationBudget | None:
    """Return the budget for the checkpointed layers of a model that this optimizer trains, or None without any."""
    layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    trained = sum(parameter.numel() for parameter in base.parameters() if parameter.requires_grad)
    return ActivationBudget(layers, trained * training_bytes(optimizer)) if layers else None
