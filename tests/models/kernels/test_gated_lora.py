"""Gated blocks with an adapter on each layer as one node, beside PEFT's forward of the same blocks."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiny_models import relative_difference, tiny
from upweight.models.kernels import lora_linear
from upweight.models.kernels.fused_layers import fuse_layers
from upweight.models.kernels.lora_linear import LowRankGated, gated_gradients, silu_product
from upweight.models.modules import GATED_PROJECTIONS
from upweight.models.patches import add_adapters_in_place

BLOCK = [*GATED_PROJECTIONS]
WIDE = 48


def model_of(kind="qwen2", dtype=torch.float32, targets=BLOCK, ranks=None, model=None, **settings):
    torch.manual_seed(0)
    model = model or tiny(kind, num_hidden_layers=2, intermediate_size=WIDE)
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False, rank_pattern=ranks or {}, **settings
    )
    return get_peft_model(model, config).to(dtype).train()


def as_nodes(model):
    add_adapters_in_place(model)
    fuse_layers(model)
    return model


def blocks(model):
    return [module for module in model.modules() if type(module).__name__.endswith("MLP")]


def outcome(block, x, *, wants_x=True):
    """The output of a block and the gradients of its input and adapters."""
    x = x.clone().requires_grad_(wants_x)
    out = block(x)
    block.zero_grad()
    (out * torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view(out.shape)).sum().backward()
    grads = {name: weight.grad.clone() for name, weight in block.named_parameters() if weight.grad is not None}
    return out.detach(), grads | ({"x": x.grad} if wants_x else {})


@pytest.fixture
def nodes(monkeypatch):
    calls = []
    apply = LowRankGated.apply
    monkeypatch.setattr(LowRankGated, "apply", lambda *args: calls.append(args) or apply(*args))
    return calls


@pytest.mark.parametrize("wants_x", [True, False])
@pytest.mark.parametrize(("shape", "dtype", "limit"), [((2, 9), torch.float32, 1e-6), ((700,), torch.float64, 1e-14)])
@pytest.mark.parametrize("ranks", [{}, {"up_proj": 3, "down_proj": 7}], ids=["one rank", "three ranks"])
def test_values_and_gradients_are_pefts(ranks, shape, dtype, limit, wants_x, nodes):  # noqa: PLR0917
    model = model_of(ranks=ranks, dtype=dtype)
    block = blocks(model)[0]
    x = torch.randn(*shape, block.gate_proj.in_features, dtype=dtype)
    out, right = outcome(block, x, wants_x=wants_x)
    as_nodes(model)
    nodes.clear()
    found, grads = outcome(block, x, wants_x=wants_x)
    assert len(nodes) == 1
    assert float((found - out).norm() / out.norm()) < limit
    assert grads.keys() == right.keys()
    for name, gradient in grads.items():
        assert float((gradient - right[name]).norm() / right[name].norm()) < limit


def test_bfloat16_is_as_close_as_pefts(nodes):
    exact = model_of(dtype=torch.float64)
    x = torch.randn(64, blocks(exact)[0].gate_proj.in_features).bfloat16()
    half = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    _, right = outcome(blocks(exact)[0], x.double())
    _, peft = outcome(blocks(half)[0], x)
    as_nodes(half)
    nodes.clear()
    _, found = outcome(blocks(half)[0], x)
    assert len(nodes) == 1
    for name in right:
        errors = [float((grads[name].double() - right[name]).norm()) for grads in (found, peft)]
        assert errors[0] < 1.2 * errors[1]


def test_without_gradients_the_numbers_are_the_same():
    model = as_nodes(model_of())
    block = blocks(model)[0]
    x = torch.randn(3, 5, block.gate_proj.in_features)
    with torch.no_grad():
        assert torch.equal(block(x), block(x.clone().requires_grad_()))


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_kept_is_two_tensors_of_the_width(packed, monkeypatch):
    model = model_of()
    block, rows = blocks(model)[0], 40
    x = torch.randn(rows, block.gate_proj.in_features, requires_grad=True)
    if packed:  # as bytes that are unpacked for each product
        weights = {id(getattr(block, name).base_layer.weight): name for name in BLOCK}
        monkeypatch.setattr(lora_linear, "is_packed", lambda weight: id(weight) in weights)
    kept = []
    as_nodes(model) if not packed else add_adapters_in_place(model)
    with saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        tensors = [plain_parts(block, at) for at in ("weight", "lora_A", "lora_B")]
        out = LowRankGated.apply([3.0] * 3, False, x, *tensors[0], *tensors[1], *tensors[2])
    assert [tuple(one.shape) for one in kept].count((rows, WIDE)) == 2
    held = sum(one.numel() for one in kept if one is not None and len(one) == rows)
    assert held == rows * (x.shape[1] + 2 * WIDE + 3 * 4)
    of_weights = [getattr(block, name).base_layer.weight for name in BLOCK]
    assert sum(any(one is weight for weight in of_weights) for one in kept) == (0 if packed else 3)
    assert out.shape == x.shape


def plain_parts(block, part):
    layers = [getattr(block, name) for name in BLOCK]
    return [layer.base_layer.weight if part == "weight" else getattr(layer, part)["default"].weight for layer in layers]


class WideTensors(TorchDispatchMode):
    """The most storages of so many numbers that live at the same time."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.living, self.most = numbers, {}, 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        out = operation(*arguments, **(options or {}))
        for one in tree_leaves((arguments, out)):
            if isinstance(one, torch.Tensor) and one.numel() == self.numbers:
                self.living[one.untyped_storage().data_ptr()] = StorageWeakRef(one.untyped_storage())
        self.living = {at: storage for at, storage in self.living.items() if not storage.expired()}
        self.most = max(self.most, len(self.living))
        return out


def test_backward_has_three_tensors_of_the_width(monkeypatch):
    monkeypatch.setattr(lora_linear, "GATED_ROWS", 16)
    model, rows = model_of(), 40
    most = []
    for _ in range(2):
        block = blocks(model)[0]
        loss = block(torch.randn(rows, block.gate_proj.in_features, requires_grad=True)).sum()
        with WideTensors(rows * WIDE) as wide:
            loss.backward()
        most.append(wide.most)
        as_nodes(model)
    assert most[1] == 3 < most[0]


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_second_backward_is_refused(retain_graph):
    block = blocks(as_nodes(model_of()))[0]
    loss = block(torch.randn(3, block.gate_proj.in_features)).sum()
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match=r"backward .*(runs once|second time)"):
        loss.backward()


def test_a_gradient_of_gradients_is_refused():
    block = blocks(as_nodes(model_of()))[0]
    x = torch.randn(3, block.gate_proj.in_features, requires_grad=True)
    with pytest.raises(RuntimeError, match="without a graph"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)


def test_gradients_do_not_need_an_output_that_is_unread(monkeypatch):
    block = blocks(as_nodes(model_of()))[0]
    x = torch.randn(30, block.gate_proj.in_features)
    _, right = outcome(block, x)
    products = []
    monkeypatch.setattr(lora_linear, "is_unread", lambda module: module is block.down_proj)
    monkeypatch.setattr(lora_linear, "silu_product", lambda *args: products.append(args))
    found = outcome(block, x)[1]
    assert not products
    assert all(torch.equal(gradient, right[name]) for name, gradient in found.items())


def one_without_adapter(model):
    return model_of(targets=BLOCK[:2])


def in_half_precision(model):
    for layer in (getattr(block, name) for block in blocks(model) for name in BLOCK):
        layer.base_layer.weight.data = layer.base_layer.weight.data.bfloat16()
    return model


def with_two_adapters(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=BLOCK, init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


def merged(model):
    model.merge_adapter()
    return model


def watched(model):
    for block in blocks(model):
        block.up_proj.register_forward_hook(lambda *_: None)
    return model


def gathered_by_zero(model):
    for block in blocks(model):
        block.gate_proj.base_layer.weight.ds_id = 1
    return model


@pytest.mark.parametrize(
    "change",
    [
        gathered_by_zero,
        one_without_adapter,
        with_two_adapters,
        merged,
        watched,
        lambda _: model_of(lora_dropout=0.5),
        lambda _: model_of(use_dora=True),
        lambda _: model_of(lora_bias=True),
        lambda _: model_of("gemma2"),
        lambda _: model_of(model=tiny("llama", num_hidden_layers=2, mlp_bias=True)),
        lambda _: model_of("qwen2").requires_grad_(True),
    ],
)
def test_other_blocks_run_as_before(change, nodes):
    model = change(model_of())
    ids = torch.arange(1, 9)[None]
    torch.manual_seed(1)
    right = model(input_ids=ids).logits
    as_nodes(model)
    nodes.clear()
    torch.manual_seed(1)
    found = model(input_ids=ids).logits
    assert not nodes
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_adapters_switch_off_and_autocast_goes_around(nodes):
    model = as_nodes(model_of())
    ids = torch.arange(1, 9)[None]
    nodes.clear()
    with model.disable_adapter():
        model(input_ids=ids)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=ids)
    in_half_precision(model)
    with pytest.raises(RuntimeError, match="dtype"):  # as in PEFT
        model(input_ids=ids)
    assert not nodes


def test_a_copy_computes_with_its_weights(nodes):
    model = as_nodes(model_of())
    twin = copy.deepcopy(model)
    ids = torch.arange(1, 9)[None]
    before = model(input_ids=ids).logits
    for weight in model.parameters():
        weight.data.zero_()
    nodes.clear()
    torch.testing.assert_close(twin(input_ids=ids).logits, before)
    assert len(nodes) == 2


def test_models_without_adapters_are_left_alone():
    model = tiny("qwen2")
    fuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_all_gradients_of_a_model_are_pefts():
    model = model_of("llama", torch.float64, targets=[*BLOCK, "q_proj"])
    ids = torch.arange(1, 30)[None]

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    right = gradients()
    as_nodes(model)
    assert relative_difference(gradients(), right) < 1e-6  # norms and logits compute in float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 333])
def test_the_kernel_gives_the_numbers_of_torch(rows, dtype):
    gate, up, grad = (torch.randn(rows, 1000, device="cuda", dtype=dtype) for _ in range(3))
    exact = [one.double().cpu().requires_grad_() for one in (gate, up)]
    product = nn.functional.silu(exact[0]) * exact[1]
    right = [product.detach(), *torch.autograd.grad(product, exact, grad.double().cpu())]
    kept = silu_product(gate, up)
    found = gated_gradients(gate, up, grad)
    assert torch.equal(found[0], kept)
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in (grad, gate, up)]
    for one, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(one.double().cpu(), wanted, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
def test_blocks_on_a_gpu_have_pefts_gradients(nodes):
    model = model_of().cuda()
    block = blocks(model)[0]
    x = torch.randn(333, block.gate_proj.in_features, device="cuda")
    x = x.clone().requires_grad_()
    weights = [x, *(weight for weight in block.parameters() if weight.requires_grad)]
    right = torch.autograd.grad(block(x).square().sum(), weights)
    as_nodes(model)
    nodes.clear()
    found = torch.autograd.grad(block(x).square().sum(), weights)
    assert len(nodes) == 1
    for one, wanted in zip(found, right, strict=True):
        assert float((one - wanted).norm() / wanted.norm()) < 1e-3
