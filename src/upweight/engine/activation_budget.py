"""Gradient checkpointing no further than memory asks: layers whose activations fit are not computed twice."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GradientCheckpointingLayer

from upweight.log import logger
from upweight.models.memory import training_bytes

SHARE = 0.5  # of the memory that is free at the first training forward, for activations that are kept


class KeptLayers:
    """Decides before each training forward how many of the checkpointed layers keep their activations.

    The last ones do: their activations are used up before the first of the others is computed again. What a layer
    keeps for each token is measured on the last layer in the first forward, so any architecture is right.
    """

    def __init__(self, layers: Sequence[GradientCheckpointingLayer], owed: int) -> None:
        """`owed`: bytes that the first step will still allocate for gradients and the optimizer."""
        self.layers = list(layers)
        self.owed = owed
        self.bytes_for_token: float | None = None
        self.allowance = 0.0

    def choose(self, tokens: int) -> int:
        """Set each layer to recompute or not for a forward of so many tokens; the number of layers that keep."""
        device = next(self.layers[0].parameters()).device
        if not (torch.is_grad_enabled() and self.layers[0].training):
            return 0
        # Recomputing under FSDP gathers weights again, and ranks must do that equally often.
        if device.type != "cuda" or isinstance(self.layers[0], FSDPModule):
            return 0
        if self.bytes_for_token is None:
            self.allowance = SHARE * (_unused(device) - self.owed)
            count = 1
            self._measure(self.layers[-1], tokens, device)
        else:
            room = min(self.allowance, SHARE * _unused(device))
            count = fitting(room, self.bytes_for_token * tokens, len(self.layers))
        self.apply(count)
        return count

    def apply(self, count: int) -> None:
        """Let the last `count` layers keep their activations."""
        first_kept = len(self.layers) - count
        for number, layer in enumerate(self.layers):
            layer.gradient_checkpointing = number < first_kept

    def _measure(self, layer: nn.Module, tokens: int, device: torch.device) -> None:
        """Watch how much memory one layer's forward leaves allocated."""
        before: list[int] = []

        def enter(*_: object) -> None:
            before.append(torch.cuda.memory_allocated(device))

        def leave(*_: object) -> None:
            self.bytes_for_token = max(1, torch.cuda.memory_allocated(device) - before[0]) / tokens
            count = fitting(self.allowance, self.bytes_for_token * tokens, len(self.layers))
            logger.info(
                "gradient checkpointing: rows of %d tokens keep the activations of %d of %d layers, %.1f GiB; "
                "'gradient_checkpointing_kwargs: {every_layer: true}' recomputes all",
                tokens, count, len(self.layers), count * self.bytes_for_token * tokens / 2**30,
            )  # fmt: skip
            for handle in handles:
                handle.remove()

        handles = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]


def fitting(room: float, each: float, layers: int) -> int:
    """How many layers of `each` bytes fit into `room`: all, or fewer and twice the space to recompute another in."""
    count = int(room // each)
    return layers if count >= layers else max(0, count - 2)


def _unused(device: torch.device) -> float:
    """Bytes that this process could still allocate."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def recompute_every_layer(base: nn.Module) -> None:
    """Keep nothing from now on: memory was shorter than it looked."""
    keeper: KeptLayers | None = base.__dict__.get("_kept_layers")
    if keeper is not None:
        keeper.apply(0)
        base.__dict__["_kept_layers"] = None


def kept_layers(base: nn.Module, optimizer: str) -> KeptLayers | None:
    """The keeper for the checkpointed layers of a model that this optimizer trains, or None where it has none."""
    layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    trained = sum(parameter.numel() for parameter in base.parameters() if parameter.requires_grad)
    return KeptLayers(layers, trained * training_bytes(optimizer)) if layers else None
