"""Forwards of a model with keys and values kept by the sampler: what its attention calls cache, and its logits."""

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upweight.engine.attention.interface import tree_masks, use_tree_attention
from upweight.engine.attention.rules import AttentionParams
from upweight.engine.image_rows import image_rows
from upweight.engine.logits import LogitTransform
from upweight.engine.routing import Routing, routing_of
from upweight.errors import UserError
from upweight.models.kernels.int8_weights import Int8Weights
from upweight.models.modules import backbone_of
from upweight.models.processor import ImageReader
from upweight.models.vision import vision_family
from upweight.sampler.attention import CallAttention, attention_op
from upweight.sampler.image_prompts import ImagePrompts


@dataclass(frozen=True)
class LayerShape:
    """The keys and values that one attention call of a forward caches for a token."""

    module: nn.Module
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    params: AttentionParams


class BufferPool:
    """Named buffers with views of any shape; a view keeps its address until a larger one is requested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved = 0  # counts changes of address
        self._buffers: dict[Any, Tensor] = {}

    def view(self, name: Any, shape: Sequence[int], dtype: torch.dtype, *, keep: bool = False) -> Tensor:
        """Return a view of the buffer's beginning, with the values of earlier uses, or zeros.

        `keep`: a larger buffer begins with the values of the smaller one, and both exist for a moment.
        """
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            self.moved += 1
            old = self._buffers.pop(name, None) if keep else None
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
            if old is not None and old.dtype == dtype:
                buffer[: old.numel()] = old
        return buffer[:size].view(*shape)

    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()
        self.moved += 1


class _Shapes:
    """Records the shapes of each attention call without attending; it is the tree itself."""

    def __init__(self, position_BN: Tensor) -> None:
        self.layers: list[LayerShape] = []
        self.position_BN = position_BN

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.layers.append(LayerShape(module, key.shape[1], key.shape[-1], value.shape[-1], key.dtype, params))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class CachedForward:
    """A model whose attention is computed by the sampler."""

    def __init__(
        self,
        base: PreTrainedModel,
        device: torch.device,
        reader: ImageReader | None = None,
        records: Routing | None = None,  # the routers whose choices are recorded
    ) -> None:
        self.base, self.device, self.records = base, device, records
        self.int8: Int8Weights | None = None  # read in place of the weights for few rows
        self.images = ImagePrompts(reader)
        family = vision_family(base.config)
        self.shifts = reader is not None and family is not None and family.has_grid  # positions after images
        # By attention call: some models attend with one module more than once in a forward.
        self._layers: list[LayerShape] = []

    @property
    def layers(self) -> list[LayerShape]:
        """The attention calls of a forward, in their order."""
        use_tree_attention(self.base)
        if not self._layers:
            zero_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            shapes = _Shapes(zero_11)
            self.logits(zero_11, zero_11, shapes, None)
            self._layers = shapes.layers
        return self._layers

    def token_bytes(self) -> int:
        """Return the bytes that one token takes in the caches of all layers."""
        routes = 0 if self.records is None else self.records.layers * self.records.top_k * torch.int16.itemsize
        widths = [layer.heads * (layer.key_width + layer.value_width) * layer.dtype.itemsize for layer in self.layers]
        return sum(widths) + routes

    def route_buffer(self, tokens: int) -> Tensor | None:
        """Return room for the experts of so many tokens, where they are recorded."""
        return None if self.records is None else self.records.buffer(tokens, self.device)

    def logits(
        self,
        ids_BN: Tensor,
        position_BN: Tensor,
        calls: CallAttention | _Shapes,
        at: Tensor | None,
        images: dict[str, Any] | None = None,
        *,
        routes_NLA: Tensor | None = None,
    ) -> Tensor:
        """Return logits at flat positions, or at all, through the head's forward and the engine's logit transform.

        `images`: of `ImagePrompts.inputs`, if any of the tokens stand for or after images.
        `routes_NLA`: takes the experts that routers choose.
        """
        inputs: dict[str, Any] = {"position_ids": position_BN, "use_cache": False}
        inputs["attention_mask"] = torch.ones_like(ids_BN)
        params, body = self.base.__dict__["_logit_transform"], backbone_of(self.base)
        if images is None:
            inputs["input_ids"] = ids_BN
        elif params is None:
            name = type(self.base).__name__
            raise UserError(f"{name}: the head is more than a projection, and nothing is sampled after images")
        else:
            rows = image_rows(self.base, images, ids_BN)
            inputs, body = inputs | rows.inputs, rows.call
        attention = nullcontext(calls) if isinstance(calls, _Shapes) else attention_op(calls, position_BN)
        routing = routing_of(self.base)
        recorded = nullcontext() if routing is None else routing.recording(routes_NLA)
        with recorded, attention as tree, tree_masks(tree):
            if params is None:
                stock = self.base.__dict__["_stock_forward"]
                can_select = "logits_to_keep" in inspect.signature(type(self.base).forward).parameters
                kept = {"logits_to_keep": at} if can_select and at is not None else {}
                logits = stock(**inputs, **kept).logits.flatten(0, 1)
                return logits if can_select or at is None else logits[at]
            hidden = body(**inputs)[0].flatten(0, 1)
        head: Any = self.base.get_output_embeddings()
        projected = head(hidden if at is None else hidden[at])
        return projected if params == LogitTransform() else params(projected.float())
