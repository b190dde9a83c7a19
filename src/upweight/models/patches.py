"""Patches of transformers, PEFT and accelerate; each has a test that shows when it can be removed."""

import functools
import os
import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from huggingface_hub import constants
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from upweight.models.kernels.lora_linear import LowRankLinear, few_rows, is_few, is_known_linear, plain_adapter
from upweight.models.kernels.packed_product import dense
from upweight.models.kernels.recompute import draws, is_unread, note_output, recompute_layer
from upweight.models.kernels.rotary import NAME, fused_form, same_rotation
from upweight.models.modules import context_value, wrap_forward


def shard_on_cpu(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make accelerate shard over CPU ranks, where it silently drops the plugin and uses DDP."""
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def spell_out_offline() -> None:
    """Write out an empty HF_HUB_OFFLINE, which the hub reads as unset; PEFT raises where it is neither yes nor no."""
    if not os.environ.get("HF_HUB_OFFLINE", "0"):
        os.environ["HF_HUB_OFFLINE"] = str(int(constants.HF_HUB_OFFLINE))


def end_shard_group(head: nn.Module, hidden_TD: Tensor) -> None:
    """Run a sharded head on no rows; FSDP2 shards it with the last norm, and torch 2.11 waits until both have run."""
    if isinstance(head, FSDPModule):
        head(hidden_TD[:0])


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Use eager attention for models with a soft cap (Gemma 2), which SDPA drops before transformers 5.21."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


_lengths_B: ContextVar[Tensor | None] = ContextVar("lengths_B", default=None)


def rope_row_lengths(lengths_B: Tensor) -> AbstractContextManager[None]:
    """Let rotary embeddings that depend on length use the length of each row inside, not that of the widest row."""
    return context_value(_lengths_B, lengths_B)


def scale_rope_by_row_length(model: nn.Module) -> None:
    """Let rotary embeddings depend on the length of each sequence; stock ones take that of the widest row so far."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            wrap_forward(module, _rotary_forward)


def _rotary_forward(self: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the stock forward once for each length."""

    def stock(positions_BN: Tensor) -> Any:
        for name in [name for name in vars(self) if name.endswith("max_seq_len_cached")]:
            setattr(self, name, 0)
        return self.__dict__["_stock_forward"](x, positions_BN, *args, **kwargs)

    lengths_B = _lengths_B.get()
    if lengths_B is None:
        return stock(position_ids)
    lengths, number_B = lengths_B.unique(return_inverse=True)
    parts = [stock(position_ids[..., :1, :].clamp(max=length - 1)) for length in lengths.tolist()]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[number_B]
    return tuple(torch.cat(part)[number_B] for part in zip(*parts, strict=True))


def add_adapters_in_place(model: nn.Module) -> None:
    """Let plain LoRA layers add their term inside the matrix product; PEFT takes three passes over the output."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and is_known_linear(module):
            wrap_forward(module, _lora_forward)


def _lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the base layer's output plus the active adapter's term; layers that are not plain run PEFT's forward."""
    plain = None if args or kwargs else plain_adapter(self, x)
    if plain is None:
        return self.__dict__["_stock_forward"](x, *args, **kwargs)
    weight, bias, down, up, scaling = plain
    x_ND = x.reshape(-1, x.shape[-1])
    if few_rows is not None and is_few(x_ND, self.out_features) and len(down) <= few_rows.MOST_RANK:
        biases = [] if bias is None else [bias]
        out = few_rows.few_rows_linears(x_ND, [dense(weight)], biases, [down], [up], [scaling])
    elif torch.compiler.is_compiling():
        out = F.linear(x_ND, weight, bias) + scaling * F.linear(F.linear(x_ND, down), up)
    else:
        out = LowRankLinear.apply(scaling, bias, is_unread(self), x_ND, weight, down, up)
        assert isinstance(out, Tensor)
        note_output(self, out)
    return out.view(*x.shape[:-1], out.shape[-1])


def fuse_rotary(model: nn.Module) -> None:
    """Rotate queries and keys in fewer launches on a GPU, by a function that is replaced in the files of its layers."""
    for module in model.modules():
        weight = next(module.parameters(), None)
        if weight is not None and weight.is_cuda:
            _fuse_in_file(type(module).__module__)


@functools.cache
def _fuse_in_file(name: str) -> None:
    """Replace the function of a file, where there is one, and where the fused form gives the same."""
    file = sys.modules[name]
    if (stock := getattr(file, NAME, None)) is not None and same_rotation(stock, fused := fused_form(stock)):
        setattr(file, NAME, fused)


def recompute_in_one_node(base: PreTrainedModel) -> None:
    """Let the checkpointed layers of a dense model be recomputed as one node each, of which the host has less work."""
    # Routers are read where they run, which is under no gradients in such a node.
    if getattr(base.config.get_text_config(), "num_experts_per_tok", None):
        return
    for layer in base.modules():
        stock = vars(layer).get("_gradient_checkpointing_func")
        if isinstance(layer, GradientCheckpointingLayer) and stock is not None and not draws(layer):
            vars(layer)["_gradient_checkpointing_func"] = functools.partial(recompute_layer, layer, stock)
