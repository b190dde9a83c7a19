"""Decoder layers in few launches: norm with query, key and value; rotation with attention; norm with gate and up; ...

Decoding a small model takes as long as its launches, and compiling layers for each number of rows takes longer than a
rollout. Layers of the usual form need no compiler: five kernels of ours compute one for few rows, and torch's products
with three of ours for many. A model takes this way where its logits on random tokens are those of transformers' layers.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upweight.engine.attention.rules import AttentionParams
from upweight.errors import UserError
from upweight.models.kernels.fused_layers import epsilon_of, is_gated_mlp, is_rms_norm, plain_weights
from upweight.models.kernels.int8_weights import Int8Weights
from upweight.models.kernels.launch import only_compiling
from upweight.models.kernels.lora_linear import few_rows, gated, is_few
from upweight.models.kernels.tiles import FEW_ROWS, most_gated_rows
from upweight.models.modules import GATED_PROJECTIONS, replaced_forwards
from upweight.sampler.attention import RotatingAttention, Rotation, running_attention
from upweight.sampler.forward import CachedForward

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_TRIED_TOKENS = 12
_LARGEST_DIFFERENCE = 0.1  # of logits by another order of roundings, as a share of their mean size; else 1 and more


def fused_decoder(forward: CachedForward) -> dict[nn.Module, Callable[..., Tensor]]:
    """Return the fused forward of each decoder layer; none where a layer has another form."""
    around = usual_layers(forward)
    if not around:
        return {}
    fused = FusedDecoder({layer.module: layer.params for layer in forward.layers}, around, forward.int8)
    forwards: dict[nn.Module, Callable[..., Tensor]] = dict.fromkeys(around, fused)
    return forwards if _same_logits(forward, forwards) else {}


def usual_layers(forward: CachedForward) -> list[nn.Module]:
    """Return the decoder layers of a model in which all have the usual form; none of another model."""
    modules: dict[str, nn.Module] = dict(forward.base.named_modules())
    calls = Counter(layer.module for layer in forward.layers)
    around = [modules[path.rpartition(".")[0]] for path, module in modules.items() if module in calls]
    return around if len(around) == len(forward.layers) and all(map(_has_form, around)) else []


def products(forward: CachedForward) -> list[nn.Module]:
    """Return the linear layers of all MLPs, which are most of the weights; raise where layers have another form."""
    blocks = [layer.get_submodule("mlp") for layer in usual_layers(forward)]
    linear = [getattr(mlp, name) for mlp in blocks for name in GATED_PROJECTIONS]
    if not linear or any(type(getattr(one, "base_layer", one)) is not nn.Linear for one in linear):
        name = type(forward.base).__name__
        problem = f"weights are read in 8 bits in decoder layers of the form of Llama, and {name} has others"
        raise UserError(f"trl.sampler_quantization: {problem}. Leave it out.")
    return linear


def _has_form(layer: nn.Module) -> bool:
    """Return whether a layer has the parts of a usual decoder layer, and none besides."""
    if {name for name, _ in layer.named_children()} != _PARTS or "forward" in vars(layer):
        return False
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    named = dict(attention.named_children())
    inner = [named[name] for name in _NORMS if name in named]
    if set(named) - {"rotary_emb"} not in (_PROJECTIONS, _PROJECTIONS | _NORMS):
        return False
    norms = [layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm"), *inner]
    return all(map(is_rms_norm, norms)) and is_gated_mlp(mlp)


def _same_logits(forward: CachedForward, forwards: dict[nn.Module, Callable[..., Tensor]]) -> bool:
    """Return whether fused layers give the logits of transformers' layers on random tokens, by an attention made up."""
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = forward.base.get_input_embeddings()
    ids_B1 = torch.randint(len(embeddings.weight), (_TRIED_TOKENS, 1), generator=generator).to(forward.device)
    position_B1 = torch.arange(_TRIED_TOKENS, device=forward.device)[:, None] * 7

    def attend(call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        repeat = query.shape[1] // key.shape[1]
        return value.repeat_interleave(repeat, 1) + 0.5 * query + 0.25 * key.repeat_interleave(repeat, 1)

    right_BV = forward.logits(ids_B1, position_B1, attend, None).float()
    try:
        with replaced_forwards(forwards):
            if few_rows is not None and forward.device.type == "cuda":
                with only_compiling() as able:
                    if able:
                        forward.logits(ids_B1, position_B1, attend, None)
            logits_BV = forward.logits(ids_B1, position_B1, attend, None).float()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a layer of another form, or its shapes, raise
        return False
    return bool((logits_BV - right_BV).abs().mean() <= _LARGEST_DIFFERENCE * right_BV.abs().mean())


class _Known(NamedTuple):
    """What a layer knows about its output: the sums of its squares, and the output times the next norm's weight."""

    out: Tensor
    squares_TN: Tensor
    weighted_ND: Tensor
    norm: nn.Module


class FusedDecoder:
    """The forward of decoder layers; what one layer knows about its output is used by the next."""

    def __init__(
        self, params: dict[nn.Module, AttentionParams], layers: Sequence[Any], int8: Int8Weights | None = None
    ) -> None:
        """`layers`: those of the decoder, in their order."""
        self._params, self._int8 = params, int8
        self._next_norms = {layer: after.input_layernorm for layer, after in pairwise(layers)}
        self._known: _Known | None = None

    def __call__(
        self, layer: Any, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
    ) -> Tensor:
        """Return a layer's output, for the arguments that a transformers model gives it."""
        attention, mlp = layer.self_attn, layer.mlp
        x_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        known, self._known = self._known, None
        if known is not None and (known.out is not hidden_states or known.norm is not layer.input_layernorm):
            known = None
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        parts = self._projected(x_ND, layer.input_layernorm, projections, known)
        width = attention.head_dim
        query, key, value = (
            part.unflatten(-1, (-1, width)).unflatten(0, hidden_states.shape[:2]).transpose(1, 2) for part in parts
        )
        attended = self._attend(attention, query, key, value, position_embeddings)
        attended_ND = attended.transpose(1, 2).reshape(len(x_ND), -1)
        x_ND, known = self._added(attended_ND, attention.o_proj, x_ND, layer.post_attention_layernorm)
        gated_NF = self._gated(x_ND, layer.post_attention_layernorm, mlp, known)
        x_ND, known = self._added(gated_NF, mlp.down_proj, x_ND, self._next_norms.get(layer))
        out = x_ND.view(hidden_states.shape)
        self._known = None if known is None else known._replace(out=out)
        return out

    def _attend(self, attention: Any, query: Tensor, key: Tensor, value: Tensor, embeddings: Any) -> Tensor:
        """Attend as the running forward does, with queries and keys normed and rotated by it or before."""
        context: Any
        call, context = running_attention()
        params = self._params[attention]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        cos, sin = embeddings
        if isinstance(context, RotatingAttention) and cos.shape[-1] == query.shape[-1]:
            query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
            epsilon = 0.0 if norms[0] is None else epsilon_of(norms[0]) or 0.0
            rotation = Rotation(cos.contiguous(), sin.contiguous(), query_norm, key_norm, epsilon)
            return context.attend_rotated(call, query, key, value, params, rotation)
        if norms[0] is not None and norms[1] is not None:
            query, key = norms[0](query), norms[1](key)
        return context(call, _rotated(query, cos, sin), _rotated(key, cos, sin), value, params)

    def _projected(self, x_ND: Tensor, norm: Any, layers: Sequence[Any], known: _Known | None) -> Sequence[Tensor]:
        """Return the outputs of layers for the norm of x."""
        parts = plain_weights(x_ND, list(layers))
        if few_rows is None or parts is None or len(parts[1]) not in (0, len(layers)):
            normed_ND = norm(x_ND)
            return [layer(normed_ND) for layer in layers]
        weights, *others = parts
        # Unfused, each layer with an adapter would cost two more launches, so there the limit holds for each layer.
        width = sum(map(len, weights)) // (len(weights) if others[1] else 1)
        if not is_few(x_ND, width):
            return _each(norm(x_ND), parts)
        x_ND, rest = self._normed(x_ND, norm, known)
        read, scales = self._read(x_ND, layers, weights)
        out_NF = few_rows.linears(x_ND, read, *others, norm=rest, scales=scales).out_NF
        return out_NF.split([len(weight) for weight in weights], -1)

    def _normed(self, x_ND: Tensor, norm: Any, known: _Known | None) -> tuple[Tensor, Any]:
        """Return the norm of x; or x times the norm's weight, and what is left for a kernel."""
        if known is None or few_rows is None:
            return norm(x_ND), None
        return known.weighted_ND, few_rows.InputNorm(epsilon_of(norm) or 0.0, known.squares_TN)

    def _added(self, x_ND: Tensor, layer: Any, residual_NF: Tensor, next_norm: Any) -> tuple[Tensor, _Known | None]:
        """Return the sum of a layer's output and a residual, which may be overwritten, and what is known about it."""
        parts = plain_weights(x_ND, [layer])
        if few_rows is not None and parts is not None:
            weights, *others = parts
            biases, downs, *_ = others
            # Beyond, torch is faster for one layer without an adapter, although the next norm is a launch then.
            if is_few(x_ND, len(weights[0])) and (downs or len(x_ND) <= FEW_ROWS):
                read, scales = self._read(x_ND, [layer], weights)
                weight = None if next_norm is None else next_norm.weight
                added = few_rows.linears(
                    x_ND, read, *others, residual_NF=residual_NF, next_weight=weight, scales=scales
                )
                if added.weighted_NF is None or next_norm is None:
                    return added.out_NF, None
                return added.out_NF, _Known(added.out_NF, added.squares_TN, added.weighted_NF, next_norm)
            if not biases and not downs:
                return residual_NF.addmm_(x_ND, weights[0].t()), None
            return residual_NF + _each(x_ND, parts)[0], None
        return residual_NF + layer(x_ND), None

    def _gated(self, x_ND: Tensor, norm: Any, mlp: Any, known: _Known | None) -> Tensor:
        """Return silu(gate) * up of the norm of x."""
        parts = plain_weights(x_ND, [mlp.gate_proj, mlp.up_proj])
        if few_rows is None or gated is None or parts is None or parts[1]:
            normed_ND = norm(x_ND)
            return F.silu(mlp.gate_proj(normed_ND)) * mlp.up_proj(normed_ND)
        weights, _, downs, ups, scalings = parts
        if len(x_ND) <= (FEW_ROWS if downs else most_gated_rows(len(weights[0]))):
            x_ND, rest = self._normed(x_ND, norm, known)
            weights, scales = self._read(x_ND, [mlp.gate_proj, mlp.up_proj], weights)
            return gated.gated_linears(x_ND, weights, downs, ups, scalings, rest, scales)
        x_ND = norm(x_ND)
        narrow_NR = few_rows.linears(x_ND, downs, [], [], [], []).out_NF if downs else x_ND
        gate_NF, up_NF = (F.linear(x_ND, weight) for weight in weights)
        return gated.gated_terms(gate_NF, up_NF, narrow_NR, ups, scalings)

    def _read(self, x_ND: Tensor, layers: Sequence[Any], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights that layers read for rows of x, and the scales of those in 8 bits."""
        copies = [] if self._int8 is None else self._int8.of(x_ND, layers)
        return ([copy.pairs_FP for copy in copies] or weights), [copy.scale_F for copy in copies]


def _each(x_ND: Tensor, parts: Any) -> list[Tensor]:
    """Return the output of each layer by torch's products, from its weight, bias and adapter."""
    weights, biases, *adapters = parts
    with_bias = zip(weights, biases or [None] * len(weights), strict=True)
    outputs = [F.linear(x_ND, weight, bias) for weight, bias in with_bias]
    for out_NF, down, up, scaling in zip(outputs, *adapters, strict=False):
        out_NF.addmm_(F.linear(x_ND, down), up.t(), alpha=scaling)
    return outputs


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
