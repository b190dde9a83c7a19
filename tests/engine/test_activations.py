"""Activations that are recomputed, or go through host memory, give the same gradients; noise keeps its bounds."""

import pytest
import torch

from tiny_models import gradients, group, relative_difference, three_levels, tiny
from upweight.engine import Engine, activations
from upweight.engine.activations import (
    OffloadActivations,
    activation_budget,
    add_noise,
    enable_checkpointing,
    layers_that_fit,
    longest_through,
    recompute_every_layer,
    weight_addresses,
)
from upweight.engine.packing import build_batch, whole_blocks
from upweight.models.memory import HEAD_CHUNK


def recomputing(model):
    return [layer.gradient_checkpointing for layer in model.model.layers]


@pytest.mark.parametrize(
    ("budget", "layer_bytes", "count"),
    [(100, 30, 1), (29, 30, 0), (-5, 30, 0), (209, 30, 4), (211, 30, 7), (1e9, 30, 7)],
)
def test_as_many_layers_as_fit(budget, layer_bytes, count):
    assert layers_that_fit(budget, layer_bytes, 7) == count


def test_the_last_layers_keep_their_activations():
    model = tiny("llama", num_hidden_layers=3).train()
    assert activation_budget(model, "adamw") is None
    enable_checkpointing(model)
    budget = activation_budget(model, "adamw")
    assert budget is not None
    budget.apply(2)
    assert recomputing(model) == [True, False, False]


@pytest.mark.parametrize(("optimizer", "layer_bytes"), [("adamw_torch_fused", 12), ("adamw_bnb_8bit", 6), ("sgd", 4)])
def test_what_gradients_and_the_optimizer_will_take_is_left_to_them(optimizer, layer_bytes):
    model = tiny("llama").train()
    model.lm_head.requires_grad_(False)
    enable_checkpointing(model, optimizer=optimizer)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert model.__dict__["_activation_budget"].reserved == layer_bytes * trained + HEAD_CHUNK


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_gradients_do_not_depend_on_what_is_kept(count):
    model = tiny("llama", num_hidden_layers=3).train()
    engine, batch = Engine(model), build_batch(group())
    right = gradients(model, engine(model, batch).logps_T.sum())
    enable_checkpointing(model)
    model.__dict__["_activation_budget"].apply(count)
    assert relative_difference(gradients(model, engine(model, batch).logps_T.sum()), right) < 1e-6
    assert recomputing(model) == [number < 3 - count for number in range(3)]


def test_nothing_is_kept_once_memory_ran_out():
    model = tiny("llama", num_hidden_layers=3).train()
    enable_checkpointing(model)
    model.__dict__["_activation_budget"].apply(2)
    recompute_every_layer(model)
    recompute_every_layer(model)
    assert all(recomputing(model))
    assert model.__dict__["_activation_budget"] is None


def test_without_a_gpu_every_layer_is_computed_again():
    model = tiny("llama").train()
    enable_checkpointing(model)
    Engine(model)(model, build_batch(group()))
    assert all(recomputing(model))


@pytest.mark.gpu
@pytest.mark.parametrize("every_layer", [True, False])
def test_what_fits_is_kept_on_a_gpu(every_layer):
    sizes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 1024}  # the kernel wants heads of 16
    model = tiny("llama", num_hidden_layers=3, **sizes).cuda().train()
    engine, batch = Engine(model), build_batch(group(200, (150, 90)), pad_to=whole_blocks).to("cuda")
    right = gradients(model, engine(model, batch).logps_T.sum())
    enable_checkpointing(model, every_layer=every_layer)
    for _ in range(2):
        found = gradients(model, engine(model, batch).logps_T.sum())
        assert relative_difference(found, right) < 1e-3
    assert recomputing(model) == [every_layer] * 3
    budget = model.__dict__["_activation_budget"]
    if budget is not None:
        budget.budget = 2.5 * budget.bytes_for_token * batch.ids_BN.numel()
        with torch.no_grad():
            engine(model, batch)
        assert not any(recomputing(model))  # without gradients nothing is kept, and nothing need be chosen
        engine(model, batch)
        assert recomputing(model) == [True, True, True]


def found(checkpointing, offload):
    model = tiny("llama").train()
    engine = Engine(model)
    if checkpointing:
        enable_checkpointing(model)
    if not offload:
        return gradients(model, engine(model, build_batch(group() + three_levels())).logps_T.sum()), 0
    moved = []

    class Watched(OffloadActivations):
        def _pack(self, tensor):
            packed = super()._pack(tensor)
            moved.extend([] if isinstance(packed, torch.Tensor) else [tensor])
            return packed

    with Watched(weight_addresses(model), smallest=64):
        loss = engine(model, build_batch(group() + three_levels())).logps_T.sum()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not any(tensor.untyped_storage().data_ptr() in weights for tensor in moved)
    return gradients(model, loss), len(moved)


def test_gradients_are_the_same_and_fewer_tensors_move_with_checkpointing():
    counts = []
    for checkpointing in (False, True):
        right, _ = found(checkpointing, offload=False)
        same, moved = found(checkpointing, offload=True)
        assert all(torch.equal(same[name], right[name]) for name in right)
        counts.append(moved)
    assert counts[0] > counts[1] >= 3


class _Kept(torch.autograd.Function):
    """Keeps a tensor for backward, and notes its strides there."""

    strides: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        _Kept.strides = x.stride()
        return grad * 2


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_copies_beside_the_computation_change_no_gradient(checkpointing):
    """Each of many layers waits for its copy, forwards and backwards, while a GPU is busy."""
    torch.manual_seed(0)
    model = tiny("llama", hidden_size=256, intermediate_size=2048, num_hidden_layers=12).train().cuda()
    engine, batch = Engine(model), build_batch(group() + three_levels()).to(torch.device("cuda"))
    if checkpointing:
        enable_checkpointing(model, every_layer=True)
    right = gradients(model, engine(model, batch).logps_T.sum())
    for _ in range(3):
        model.zero_grad()
        with OffloadActivations(weight_addresses(model), smallest=64):
            loss = engine(model, batch).logps_T.sum()
        same = gradients(model, loss)
        assert all(torch.allclose(same[name], right[name], rtol=1e-5, atol=1e-6) for name in right)


@pytest.mark.parametrize("view", [lambda x: x.transpose(1, 2), lambda x: x[:, :, :8], lambda x: x[:1].expand(4, 6, 16)])
def test_what_comes_back_has_the_strides_of_what_was_saved(view):
    x = torch.randn(4, 6, 16, requires_grad=True)
    with OffloadActivations(set(), smallest=1):
        out = _Kept.apply(view(x))
    out.sum().backward()
    assert _Kept.strides == view(x).stride()


def test_host_memory_is_used_again_once_a_step_no_longer_needs_it(monkeypatch):
    activations._host_buffers.cache_clear()
    allocated, stock = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: allocated.append(args) or stock(*args, **kwargs))
    x, longer = torch.randn(4, 100, requires_grad=True), torch.randn(4, 120, requires_grad=True)

    def offloaded(value):
        with OffloadActivations(set(), smallest=1):
            return value.sin().exp().sum()

    offloaded(x).backward()
    first = len(allocated)
    waiting = offloaded(longer)  # rows of another length within the same power of two
    assert len(allocated) == first > 0
    other = offloaded(x)  # while the buffers of `waiting` are in use
    assert len(allocated) == 2 * first
    for value, out in ((longer, waiting), (x, other)):
        (grad,) = torch.autograd.grad(out, value)
        assert torch.equal(grad, torch.autograd.grad(value.sin().exp().sum(), value)[0])


def test_each_token_knows_the_longest_sequence_it_belongs_to():
    units = group(4, (3, 6, 2)) + three_levels()
    batch = build_batch(units)
    end, position = batch.end_BN[0], batch.position_BN[0]
    right = [max(position[k:e].tolist()) + 1 for k, e in enumerate(end.tolist())]
    assert longest_through(end, position).tolist() == right
    assert len(set(right)) > 2


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_noise_is_there_in_training_only_and_within_its_bounds(layout):
    model = tiny("llama")
    engine = Engine(model, layout)
    batch = build_batch(three_levels() + group(), layout)
    add_noise(model, 5.0)
    embedding, seen = model.get_input_embeddings(), []
    embedding.register_forward_hook(lambda module, args, out: seen.append(out))
    plain = torch.nn.functional.embedding(batch.ids_BN, embedding.weight)
    engine(model.eval(), batch)
    assert torch.equal(seen.pop(), plain)
    torch.manual_seed(0)
    engine(model.train(), batch).logps_T.sum().backward()
    noise = (seen.pop() - plain).abs().amax(-1)
    if layout == "tree":
        length = longest_through(batch.end_BN[0], batch.position_BN[0])[None]
    else:
        length = batch.length_B[:, None].expand_as(noise)
    bound = 5.0 / (length * plain.shape[-1]).sqrt()
    assert bool((noise <= bound).all())
    assert bool((noise > 0.5 * bound).all())
