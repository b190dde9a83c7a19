"""Products of frozen linear layers with their LoRA adapters, of one layer or of a gated block as one node.

Kernels are chosen by the number of rows.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from upweight.models.kernels.packed_product import dense, dtype_of, is_packed
from upweight.models.kernels.recompute import draws, empty, is_unread, note_output
from upweight.models.kernels.tiles import most_rows
from upweight.models.modules import GATED_PROJECTIONS

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels import gated
    from upweight.models.kernels import linear as few_rows
else:
    few_rows = gated = None  # without Triton, products of few rows run through torch

GATED_ROWS = 512  # whose gradients torch computes at a time where there is no kernel for them


def is_few(x_ND: Tensor, width: int) -> bool:
    """Return whether rows are so few that our kernel computes a product of this width faster than torch."""
    if few_rows is None or not is_half_inference(x_ND):
        return False
    return x_ND.shape[0] <= most_rows(x_ND.shape[1], width)


def is_half_inference(x_ND: Tensor) -> bool:
    """Return whether rows are on a GPU in half precision without gradients, as in sampling."""
    return x_ND.is_cuda and x_ND.dtype != torch.float32 and not torch.is_grad_enabled()


def is_known_linear(layer: Any) -> bool:
    """Return whether a layer is linear, with an adapter or without, and of a class whose forward is known."""
    if type(layer) in (nn.Linear, LoraLinear):
        return True
    base = layer.base_layer if isinstance(layer, LoraLayer) else layer
    return isinstance(base, nn.Linear) and is_packed(base.weight)


def plain_adapter(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Return weight, bias, adapter weights and scaling of a layer whose adapter only adds a low-rank product.

    The weight may be packed.
    """
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or layer.lora_variant or len(active) != 1 or layer.fan_in_fan_out:
        return None
    (name,) = active
    base, down, up, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = is_known_linear(base) and type(down) is type(up) is nn.Linear and up.bias is None
    idle = isinstance(dropout, nn.Identity) or not dropout.training
    if not (plain and idle) or torch.is_autocast_enabled(x.device.type):
        return None
    frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    if not (frozen and all(is_readable(linear, x) for linear in (base, down, up))):
        return None
    return base.weight, base.bias, down.weight, up.weight, float(layer.scaling[name])


def is_readable(linear: Any, x: Tensor) -> bool:
    """Return whether products of x may read a layer's weight, which is plain or packed, as the layer does."""
    if is_packed(linear.weight):  # a compiler would take the shape of its bytes for that of the weight
        known = linear.compute_dtype in (None, x.dtype) and not torch.compiler.is_compiling()
    else:
        known = type(linear.weight) in (Tensor, nn.Parameter)
    return known and dtype_of(linear.weight) == x.dtype


class LowRankLinear(torch.autograd.Function):
    """x W' + b + s (x A') B' for frozen W and b: the low-rank terms are added by the products themselves.

    A packed W is unpacked for each product, and only its bytes are kept.
    """

    @staticmethod
    def forward(ctx: Any, scaling: float, bias: Tensor | None, unread: bool, *tensors: Tensor) -> Tensor:
        """`unread`: nothing reads the output, which is not computed."""
        x_ND, weight, down, up = tensors
        narrow = F.linear(x_ND, down)
        if unread:
            out = empty((len(x_ND), len(up)), x_ND)
        else:
            out = F.linear(x_ND, dense(weight), bias).addmm_(narrow, up.t(), alpha=scaling)
        packed = is_packed(weight)
        ctx.save_for_backward(x_ND, narrow, None if packed else weight, down, up)
        ctx.scaling, ctx.packed = scaling, weight if packed else None  # saved, it would lose what it is unpacked by
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x_ND, narrow, weight, down, up = ctx.saved_tensors
        weight = dense(ctx.packed) if weight is None and ctx.needs_input_grad[3] else weight
        grad_narrow = _scaled_product(grad, up, ctx.scaling)
        grad_x = (grad @ weight).addmm_(grad_narrow, down) if ctx.needs_input_grad[3] else None
        grad_down = grad_narrow.t() @ x_ND if ctx.needs_input_grad[5] else None
        grad_up = _scaled_product(grad.t(), narrow, ctx.scaling) if ctx.needs_input_grad[6] else None
        return None, None, None, grad_x, None, grad_down, grad_up


class LowRankGated(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)) of three frozen layers without bias, each with an adapter, as one node.

    It keeps the outputs of gate and up, over which backward writes: three tensors of the block's width exist at most.
    """

    @staticmethod
    def forward(ctx: Any, scalings: list[float], unread: bool, x_ND: Tensor, *tensors: Tensor) -> Tensor:
        """`tensors`: weights, then `down` and `up` of the adapters; `unread`: nothing reads the output."""
        weights, downs, ups = tensors[:3], tensors[3:6], tensors[6:]
        both_downs = torch.cat(downs[:2])  # which read the same rows
        narrows = F.linear(x_ND, both_downs)
        gate, up = map(_adapted, (x_ND, x_ND), weights, _parts(narrows, downs), ups, scalings)
        if unread:
            narrow, out = None, empty((len(x_ND), len(ups[2])), x_ND)
        else:
            product = silu_product(gate, up)
            narrow = F.linear(product, downs[2])
            out = _adapted(product, weights[2], narrow, ups[2], scalings[2])
        plain = [None if is_packed(weight) else weight for weight in weights]
        ctx.save_for_backward(x_ND, gate, up, narrows, narrow, both_downs, *downs, *ups, *plain)
        ctx.packed = [weight if is_packed(weight) else None for weight in weights]
        ctx.scalings, ctx.ran = scalings, False
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if ctx.ran or torch.is_grad_enabled():  # by `retain_graph` or `create_graph`
            raise RuntimeError("backward through a gated block runs once, without a graph: compute the loss again")
        ctx.ran, (grad,), scalings = True, grad_outputs, ctx.scalings
        x_ND, gate, up, narrows, narrow, both_downs, *rest = ctx.saved_tensors
        downs, ups = rest[:3], rest[3:6]
        weights = [kept if packed is None else packed for kept, packed in zip(rest[6:], ctx.packed, strict=True)]
        grad_narrow = _scaled_product(grad, ups[2], scalings[2])
        product = (grad @ dense(weights[2])).addmm_(grad_narrow, downs[2])  # its gradient, over which it is written
        product, on_gate, on_up = gated_gradients(gate, up, product)
        narrow = F.linear(product, downs[2]) if narrow is None else narrow
        on_last = [grad_narrow.t() @ product, _scaled_product(grad.t(), narrow, scalings[2])]
        del product
        grad_narrows = torch.empty_like(narrows)
        for each, wide, scaling, out in zip(
            (on_gate, on_up), ups[:2], scalings[:2], _parts(grad_narrows, downs), strict=True
        ):
            _scaled_product(each, wide, scaling, out=out)
        grad_x = None
        if ctx.needs_input_grad[2]:
            grad_x = (on_gate @ dense(weights[0])).addmm_(on_up, dense(weights[1])).addmm_(grad_narrows, both_downs)
        on_downs = (grad_narrows.t() @ x_ND).split([len(down) for down in downs[:2]])
        on_ups = [
            _scaled_product(each.t(), part, scaling)
            for each, part, scaling in zip((on_gate, on_up), _parts(narrows, downs), scalings[:2], strict=True)
        ]
        return None, None, grad_x, None, None, None, *on_downs, on_last[0], *on_ups, on_last[1]


def gated_output(block: Any, x: Tensor) -> Tensor | None:
    """Return a gated block's output by one node; None where its layers are not plain with one plain adapter each."""
    layers = [getattr(block, name) for name in GATED_PROJECTIONS]
    if torch.compiler.is_compiling() or not all(map(_adds_in_place, layers)):
        return None
    x_ND = x.reshape(-1, x.shape[-1])
    parts = [plain_adapter(layer, x_ND) for layer in layers]
    plain = [part for part in parts if part is not None and part[1] is None]
    if len(plain) < len(layers) or is_few(x_ND, layers[0].out_features):
        return None
    weights, _, downs, ups, scalings = map(list, zip(*plain, strict=True))
    last = layers[-1]
    out = LowRankGated.apply(scalings, is_unread(last), x_ND, *weights, *downs, *ups)
    assert isinstance(out, Tensor)
    note_output(last, out)
    return out.view(*x.shape[:-1], out.shape[-1])


def has_gated_adapters(block: nn.Module) -> bool:
    """Return whether a block in host memory has the layers of a gated block, whole and each with an adapter."""
    layers: list[Any] = [getattr(block, name, None) for name in GATED_PROJECTIONS]
    if not all(_adds_in_place(layer) for layer in layers) or draws(block):
        return False
    weights = [layer.get_base_layer().weight for layer in layers]
    shapes = [(layer.out_features, layer.in_features) for layer in layers]
    return all(
        weight.device.type == "cpu" and (is_packed(weight) or weight.shape == shape)  # a shard has another
        for weight, shape in zip(weights, shapes, strict=True)
    )


def _adds_in_place(layer: Any) -> bool:
    """Return whether a layer has an adapter that is added inside its product, and nothing watches its calls.

    ZeRO-3 gathers a weight that is read, for the module that is called then.
    """
    if not isinstance(layer, LoraLayer) or "_stock_forward" not in vars(layer):
        return False
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    weight = dict.get(layer.get_base_layer()._parameters, "weight")  # not by its name, which would gather it
    return not any(vars(layer)[name] for name in hooks) and not hasattr(weight, "ds_id")


def _adapted(x_ND: Tensor, weight: Tensor, narrow: Tensor, up: Tensor, scaling: float) -> Tensor:
    """Return x W' + scaling * narrow B'."""
    return F.linear(x_ND, dense(weight)).addmm_(narrow, up.t(), alpha=scaling)


def _parts(narrows: Tensor, downs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what belongs to gate, and what to up."""
    return narrows.split([len(down) for down in downs[:2]], 1)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, on a GPU in one kernel."""
    return gated.silu_product(gate, up) if gated is not None and gate.is_cuda else F.silu(gate) * up


def gated_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return silu(gate) * up and the gradients of gate and up, written over grad, gate and up."""
    if gated is not None and gate.is_cuda:
        return gated.silu_gradients(gate, up, grad)
    for one, other, of_product in zip(*(tensor.split(GATED_ROWS) for tensor in (gate, up, grad)), strict=True):
        silu, on_silu = F.silu(one), of_product * other
        one.copy_(torch.ops.aten.silu_backward(on_silu, one))
        product = torch.mul(silu, other, out=on_silu)
        torch.mul(of_product, silu, out=other)
        of_product.copy_(product)
    return grad, gate, up


def _scaled_product(left: Tensor, right: Tensor, scaling: float, out: Tensor | None = None) -> Tensor:
    """Return scaling * left @ right, where the product itself scales: no launch more, and no rounding before it."""
    return torch.addmm(_nothing(left.dtype, left.device), left, right, beta=0, alpha=scaling, out=out)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what a product is added to where it is added to nothing."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)
