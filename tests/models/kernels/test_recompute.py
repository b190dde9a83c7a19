"""A recomputed layer as one node: the gradients of stock checkpointing, and less that is kept account of."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from tiny_models import tiny
from upweight.config.sections.model import AdapterSection
from upweight.engine.activations import enable_checkpointing
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels import lora_linear, recompute, tiled_mlp
from upweight.models.kernels.fused_layers import fuse_layers
from upweight.models.kernels.recompute import Recomputed, Rerun, is_unread, note_output, read_weights
from upweight.models.kernels.tiled_mlp import tile_blocks
from upweight.models.load import disable_dropout
from upweight.models.modules import dropout_rates
from upweight.models.patches import add_adapters_in_place
from upweight.models.precision import set_up_precision

IDS = torch.arange(2, 39)[None]


@pytest.fixture
def nodes(monkeypatch):
    """The calls of the node, by what they were given."""
    calls = []
    stock = Recomputed.apply

    def apply(*args):
        calls.append(args)
        return stock(*args)

    monkeypatch.setattr(recompute, "Recomputed", SimpleNamespace(apply=apply))
    return calls


def gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adapted(kind, **options):
    model = attach_adapter(tiny(kind), AdapterSection(kind="lora", rank=4, target_linear=True, **options))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1)
    return model.train()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen2", "cohere", "gpt_oss", "qwen3_next", "smollm3"])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_those_of_a_model_that_keeps_everything(kind, lora):
    model = adapted(kind) if lora else tiny(kind).train()
    right = gradients(model)
    enable_checkpointing(model, every_layer=True, one_node=True)
    loss, found = gradients(model)
    assert loss == pytest.approx(right[0], abs=1e-6)
    assert found.keys() == right[1].keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right[1][name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "tile", "products"),
    [
        ("llama", None, 1),  # the last of the block
        ("qwen3", None, 1),
        ("cohere", None, 2),  # attention and block side by side
        ("gemma3_text", None, 0),  # a norm reads it
        ("granite", None, 0),  # it is scaled
        ("llama", 8, 1 + 5),  # the block, and the last product of each tile
        ("gemma3_text", 8, 5),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_what_nothing_reads_is_not_computed_again(kind, tile, products, fused, monkeypatch):
    model = adapted(kind)
    right = gradients(model)
    add_adapters_in_place(model)
    if fused:  # a block is one node
        fuse_layers(model)
    enable_checkpointing(model, every_layer=True, one_node=True)
    if tile:
        monkeypatch.setattr(tiled_mlp, "TILE", tile)
        tile_blocks(model, above=tile)
    left_out = []

    def unread(shape, like):
        left_out.append(shape)
        return like.new_full(shape, torch.nan)

    for module in (recompute, lora_linear):
        monkeypatch.setattr(module, "empty", unread)
    gradients(model)  # the first recomputation shows what is read
    for _ in range(2):
        left_out.clear()
        loss, found = gradients(model)
        assert len(left_out) == products * model.config.num_hidden_layers
        assert loss == pytest.approx(right[0], abs=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, right[1][name], atol=1e-5, rtol=1e-5)


def test_an_output_that_is_read_elsewhere_is_computed(monkeypatch):
    class Layer(nn.Module):
        def __init__(self, reads):
            super().__init__()
            self.inner, self.reads = nn.Linear(4, 4), reads

        def forward(self, x):
            out = self.called(x)
            if self.reads == "again":
                return x + self.called(out)
            return x + out * out if self.reads else x + out.view(x.shape)

        def called(self, x):
            out = self.inner(x)
            note_output(self.inner, out)
            found.append(is_unread(self.inner))
            return out

    for reads in ("", "in a product", "again"):
        found: list[bool] = []
        layer = Layer(reads)
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            Recomputed.apply(Rerun(layer, layer.forward), None, x, *read_weights(layer)).sum().backward()
        assert found[-1] == (not reads)  # in the second recomputation, not before
        assert not any(found[:-1])


def test_gradients_reach_float32_masters_through_their_copies(nodes):
    model = adapted("llama")
    model.bfloat16()
    set_up_precision(model, torch.bfloat16)
    right = gradients(model)
    enable_checkpointing(model, every_layer=True, one_node=True)
    found = gradients(model)
    assert len(nodes) == 3
    assert found[0] == right[0]
    assert all(torch.equal(gradient, right[1][name]) for name, gradient in found[1].items())


def test_a_layer_that_draws_random_numbers_uses_the_stock_checkpoint(nodes):
    model = adapted("llama", dropout=0.5)
    enable_checkpointing(model, every_layer=True, one_node=True)
    gradients(model)
    assert not nodes
    disable_dropout(model)
    enable_checkpointing(model, every_layer=True, one_node=True)
    gradients(model)
    assert len(nodes) == 3


@pytest.mark.parametrize("kind", ["opt", "starcoder2", "seed_oss"])
def test_dropout_by_a_function_is_repeated_as_it_was(kind):
    """These layers have a number in place of a module for dropout."""
    model = tiny(kind).train()
    assert list(dropout_rates(model))
    for module, name, _ in list(dropout_rates(model)):
        setattr(module, name, 0.3)
    torch.manual_seed(0)
    right = gradients(model)
    enable_checkpointing(model, every_layer=True, one_node=True)
    torch.manual_seed(0)
    loss, found = gradients(model)
    assert loss == right[0]
    assert all(torch.allclose(gradient, right[1][name], atol=1e-5) for name, gradient in found.items())


def test_mixtures_use_the_stock_checkpoint_whose_routers_have_gradients(nodes):
    model = tiny("qwen3_moe").train()
    enable_checkpointing(model, every_layer=True, one_node=True)
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
    assert out.aux_loss.requires_grad
    assert not nodes


def test_without_gradients_nothing_is_saved(nodes):
    model = tiny("llama").train()
    enable_checkpointing(model, every_layer=True, one_node=True)
    with torch.no_grad():
        model(input_ids=IDS)
    assert not nodes


def test_inputs_of_layers_that_are_saved_elsewhere_are_not_held():
    model = tiny("llama").train()
    enable_checkpointing(model, every_layer=True, one_node=True)
    inputs = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    gc.collect()
    assert len(inputs) == 3
    assert not [one for one in inputs if one() is not None]
    loss.backward()


class Pair(GradientCheckpointingLayer):
    """A layer that returns more than a tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, scale=None):
        out = self.inner(x) if scale is None else self.inner(x) * scale
        return out, None


def test_other_outputs_and_other_inputs_with_gradients_use_the_stock_checkpoint():
    torch.manual_seed(0)
    layer, x = Pair().train(), torch.randn(2, 4, requires_grad=True)
    calls = []

    def stock(call, *args):
        calls.append(args)
        return call(*args)

    for _ in range(2):
        out, _ = recompute.recompute_layer(layer, stock, layer.forward, x)
        out.sum().backward()
    assert len(calls) == 2
    assert layer._stock_checkpoint
    one = nn.Linear(4, 4).train()
    recompute.recompute_layer(one, stock, lambda x, y: one(x) * y, x, torch.ones(4, requires_grad=True))
    assert len(calls) == 3


def test_a_copy_of_the_model_recomputes_with_its_own_weights():
    model = tiny("llama").train()
    enable_checkpointing(model, every_layer=True, one_node=True)
    twin = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    _, found = gradients(twin)
    assert all(float(gradient.abs().sum()) > 0 for gradient in found.values())


def test_weights_that_are_read_are_counted_once():
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.Linear(2, 2).requires_grad_(False), shared)
    assert [id(weight) for weight in read_weights(module)] == [id(shared.weight), id(shared.bias)]
