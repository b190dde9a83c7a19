"""Activations in training: recomputed where memory requires it, kept in host memory, or with noise on embeddings."""

import functools
import math
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from upweight.engine.attention.interface import Tree, current_tree
from upweight.log import logger
from upweight.models.kernels.tiled_mlp import TILE, are_tiled, tile_blocks
from upweight.models.memory import (
    HALF_BYTES,
    HEAD_CHUNK,
    KEPT_SHARE,
    LAYERS_IN_FLIGHT,
    USUAL_OPTIMIZER,
    TokenBytes,
    free_memory,
    training_bytes,
)
from upweight.models.modules import backbone_of, unwrap_peft
from upweight.models.patches import recompute_in_one_node

MIN_OFFLOADED = 1 << 18  # elements of an offloaded tensor; copying smaller tensors does not pay


def enable_checkpointing(
    model: nn.Module,
    reentrant: bool = False,
    every_layer: bool = False,
    optimizer: str = USUAL_OPTIMIZER,
    *,
    keep: float | None = None,
    one_node: bool = False,
) -> None:
    """Recompute activations in backward, in `every_layer` or in as many as memory without the optimizer's requires.

    `keep`: the share of the free memory that kept activations may take, on any device; None: the usual one of a GPU.
    `one_node`: each layer is one node of the graph, with less work for the host; its weights have to be whole.
    """
    base = unwrap_peft(model)
    if reentrant:  # forwards without gradients, those of a reference, say so although nothing is lost
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if one_node and not reentrant:
        recompute_in_one_node(base)
    base.__dict__["_activation_budget"] = None if every_layer else activation_budget(base, optimizer, keep)
    # The outputs of frozen embeddings then need gradients, or adapters get none.
    if not any(p.requires_grad for p in base.get_input_embeddings().parameters()):
        base.enable_input_require_grads()


def activation_budget(base: nn.Module, optimizer: str, keep: float | None = None) -> "ActivationBudget | None":
    """Return the budget for the checkpointed layers of a model that this optimizer trains, or None without any."""
    layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    trained = sum(parameter.numel() for parameter in base.parameters() if parameter.requires_grad)
    if not layers:
        return None
    reserved = trained * training_bytes(optimizer) + HEAD_CHUNK
    if keep is None or next(layers[0].parameters()).is_cuda:
        return ActivationBudget(layers, reserved, KEPT_SHARE if keep is None else keep)
    # Elsewhere an allocator cannot be asked what a layer keeps, and the estimate of shapes stands for it.
    text: Any = base.config.get_text_config() if isinstance(base, PreTrainedModel) else None
    width = next(iter(base.parameters())).element_size()
    return ActivationBudget(layers, reserved, keep, TokenBytes.of(text).layer * width / HALF_BYTES)


def recompute_every_layer(base: nn.Module) -> bool:
    """Recompute every layer from now on, after memory ran out; return whether some had kept their activations."""
    budget: ActivationBudget | None = base.__dict__.get("_activation_budget")
    if budget is None:
        return False
    kept = not all(layer.gradient_checkpointing for layer in budget.layers)
    budget.apply(0)
    base.__dict__["_activation_budget"] = None
    return kept


def save_less(model: nn.Module, largest: int) -> str | None:
    """Recompute activations from now on, tile gated blocks, or offload what is saved; return the key that asks for it.

    `largest`: tokens of the largest forward.
    """
    base = unwrap_peft(model)
    if base.supports_gradient_checkpointing and not base.is_gradient_checkpointing:
        enable_checkpointing(model, every_layer=True, one_node=True)
        return "gradient_checkpointing: true"
    if largest > TILE and not are_tiled(base) and tile_blocks(base, TILE):
        return "tiled_mlp: true"
    if not base.__dict__.get("_offloads_activations"):
        offload_activations(model)
        return "activation_offloading: true"
    return None


class ActivationBudget:
    """Decides before each training forward how many of the checkpointed layers keep their activations."""

    # The last layers keep theirs, because backward frees them before it recomputes the first of the other layers. The
    # bytes that a layer keeps per token are measured on the last layer in the first forward, for any architecture.

    def __init__(
        self, layers: Sequence[GradientCheckpointingLayer], reserved: int, share: float, estimated: float | None = None
    ) -> None:
        """`reserved`: bytes that the first step will still allocate for gradients, the optimizer and the head.

        `share`: of the memory that is free at the first forward; `estimated`: bytes that a layer keeps of a token.
        """
        self.layers, self.reserved, self.share = list(layers), reserved, share
        self.bytes_for_token: float | None = estimated
        self.budget: float | None = None  # bytes, from the first forward on

    def choose_kept_layers(self, tokens: int) -> None:
        """Set which layers keep their activations in a forward of so many tokens, and which recompute them."""
        device = next(self.layers[0].parameters()).device
        if not (torch.is_grad_enabled() and self.layers[0].training):
            return
        # Recomputing under FSDP gathers weights again, and ranks must do that equally often.
        if isinstance(self.layers[0], FSDPModule) or (device.type != "cuda" and self.bytes_for_token is None):
            return
        free = free_memory(device)
        if self.budget is None:
            self.budget = self.share * (free - self.reserved)
        if self.bytes_for_token is None:
            self._measure_layer(self.layers[-1], tokens, device)
            self.apply(1)
        else:
            budget = min(self.budget, self.share * free)
            self.apply(layers_that_fit(budget, self.bytes_for_token * tokens, len(self.layers)))

    def apply(self, count: int) -> None:
        """Let the last `count` layers keep their activations."""
        first_kept = len(self.layers) - count
        for number, layer in enumerate(self.layers):
            layer.gradient_checkpointing = number < first_kept

    def _measure_layer(self, layer: nn.Module, tokens: int, device: torch.device) -> None:
        """Measure how much memory the next forward of one layer leaves allocated."""
        before: list[int] = []

        def enter(*_: object) -> None:
            before.append(torch.cuda.memory_allocated(device))

        def leave(*_: object) -> None:
            self.bytes_for_token = max(1, torch.cuda.memory_allocated(device) - before[0]) / tokens
            count = layers_that_fit(self.budget or 0.0, self.bytes_for_token * tokens, len(self.layers))
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


def offload_activations(model: nn.Module) -> None:
    """Save what layers keep for backward in host memory from now on; with checkpointing, only their inputs."""
    base = unwrap_peft(model)
    base.__dict__["_offloads_activations"] = True
    body = backbone_of(base)
    stock = body.forward
    weights: set[int] = set()

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return stock(*args, **kwargs)
        weights.update(() if weights else weight_addresses(model))  # once: a model has thousands of modules
        with OffloadActivations(weights):
            return stock(*args, **kwargs)

    body.forward = forward


def weight_addresses(model: nn.Module) -> set[int]:
    """Return where the storages of a model's parameters and of their compute copies begin."""
    pairs = [
        (parameter, vars(module).get(name, parameter))  # the compute copy has the parameter's name
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return {weight.untyped_storage().data_ptr() for pair in pairs for weight in pair}


class OffloadActivations(saved_tensors_hooks):
    """A context in which forwards save large tensors for backward in host memory, all but those at `weights`."""

    def __init__(self, weights: set[int], smallest: int = MIN_OFFLOADED) -> None:
        self._weights, self._smallest = weights, smallest
        self._last: _OnHost | None = None
        self._leaving: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # tensors whose copies may not be done
        super().__init__(self._pack, self._unpack)

    def __exit__(self, *reason: object) -> None:
        super().__exit__(*reason)
        self._last = None  # the graph keeps what it needs
        self._leave(0)

    def _pack(self, tensor: Tensor) -> "_OnHost | Tensor":
        expanded = 0 in tensor.stride()  # whose elements share memory: little of it
        if tensor.numel() < self._smallest or expanded or tensor.untyped_storage().data_ptr() in self._weights:
            return tensor
        self._last = _OnHost(tensor, before=self._last)
        if self._last.copied is not None:
            self._leaving.append((tensor, self._last.copied))
            self._leave(LAYERS_IN_FLIGHT)
        return self._last

    def _leave(self, most: int) -> None:
        """Let the memory of all but the last tensors be used again, by what the GPU computes once they are copied."""
        while len(self._leaving) > most:
            tensor, copied = self._leaving.popleft()
            torch.cuda.current_stream(tensor.device).wait_event(copied)

    def _unpack(self, packed: "_OnHost | Tensor") -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.take()


class _OnHost:
    """A tensor in host memory; on a GPU it travels both ways while the GPU computes something else."""

    def __init__(self, tensor: Tensor, before: "_OnHost | None") -> None:
        """`before`: what was saved before it, which backward needs next."""
        self.device, self.stride, self.before = tensor.device, tensor.stride(), before
        buffers = _host_buffers(self.device)
        buffer = buffers.take(tensor.nbytes)
        weakref.finalize(self, buffers.give_back, buffer)
        dense = torch.empty_like(tensor, device="meta").stride()
        self.on_host = buffer[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, dense)
        self.copied = _copy_beside(tensor, self.on_host)
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fetch(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy it back; return the tensor, and what to wait for."""
        # Compiled backwards are written for the strides of what was saved.
        restored = torch.empty_strided(self.on_host.shape, self.stride, dtype=self.on_host.dtype, device=self.device)
        return restored, _copy_beside(self.on_host, restored)

    def take(self) -> Tensor:
        """Return it on its device, and start to copy what is needed next."""
        restored, copied = self.fetched or self.fetch()
        self.fetched = None
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        before, self.before = self.before, None
        if before is not None:
            before.fetched = before.fetched or before.fetch()
        return restored


class _HostBuffers:
    """Host memory for the activations of one device, used again from step to step."""

    # torch's own cache of pinned memory is emptied whenever a CUDA graph is captured, and pinning anew takes as long
    # as a step. A buffer may be given back before its last copy has ended: one stream makes all copies in order.

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._unused: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least so many bytes; sizes are powers of two, since rows differ in length."""
        size = 1 << (size - 1).bit_length()
        unused = self._unused[size]
        return unused.pop() if unused else torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be taken again."""
        self._unused[len(buffer)].append(buffer)


@functools.cache
def _host_buffers(device: torch.device) -> _HostBuffers:
    return _HostBuffers(pinned=device.type == "cuda")


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy_beside(source: Tensor, target: Tensor) -> torch.cuda.Event | None:
    """Copy between a GPU and the host beside what is computed from now on; return what says that it is done."""
    on_gpu = next((one for one in (source, target) if one.is_cuda), None)
    if on_gpu is None:
        target.copy_(source)
        return None
    stream = _copy_stream(on_gpu.device)
    stream.wait_stream(torch.cuda.current_stream(on_gpu.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    if on_gpu is target:
        target.record_stream(stream)  # it may be dropped unread
    copied = torch.cuda.Event()
    stream.record_event(copied)
    return copied


def add_noise(model: nn.Module, alpha: float) -> None:
    """Add noise within `alpha` / sqrt(length of the sequence x width) to embeddings in training mode (NEFTune)."""
    # The hook of transformers would use the length of the row, and noise would shrink with what is packed beside it.
    base = unwrap_peft(model)
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

    backbone_of(base).register_forward_pre_hook(measure, with_kwargs=True)
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
