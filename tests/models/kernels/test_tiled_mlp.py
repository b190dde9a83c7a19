"""Gated blocks in tiles: the same outputs and gradients, and never more than a tile of tokens inside."""

import copy

import pytest
import torch

from tiny_models import tiny
from upweight.config.sections.model import AdapterSection
from upweight.engine.activations import enable_checkpointing
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels import lora_linear, recompute, tiled_mlp
from upweight.models.kernels.fused_layers import fuse_layers
from upweight.models.kernels.tiled_mlp import are_tiled, is_gated_block, tile_blocks
from upweight.models.patches import add_adapters_in_place

TILE = 8
IDS = torch.arange(2, 39)[None]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiled_mlp, "TILE", TILE)


def gradients(model, ids=IDS):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def widest_block(model):
    """A list that gets the tokens of every call of a gated block's last projection."""
    seen = []
    for module in model.modules():
        if is_gated_block(module):
            module.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    return seen


@pytest.mark.parametrize("checkpointed", ["", "stock", "one node"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3", "qwen3"])
def test_losses_and_gradients_are_those_of_whole_blocks(kind, adapted, checkpointed):
    model = tiny(kind).train()
    if adapted:
        model = attach_adapter(model, AdapterSection(kind="lora", rank=4, target_linear=True))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(0, 0.1)
    if checkpointed:
        enable_checkpointing(model, every_layer=True, one_node=checkpointed == "one node")
    right = gradients(model)
    assert tile_blocks(model, above=TILE)
    seen = widest_block(model)
    loss, found = gradients(model)
    assert max(seen) == TILE
    assert loss == pytest.approx(right[0], abs=1e-6)
    assert found.keys() == right[1].keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right[1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("kind", "calls"), [("llama", 2), ("qwen3", 2), ("granite", 3), ("gemma3_text", 3)])
def test_a_layer_that_adds_its_block_last_computes_it_once_in_backward(kind, calls, adapted, monkeypatch):
    """Once more where the output is read on the way: it goes through a norm in Gemma, and is scaled in Granite."""
    model = tiny(kind).train()
    if adapted:
        model = attach_adapter(model, AdapterSection(kind="lora", rank=4, target_linear=True))
    enable_checkpointing(model, every_layer=True, one_node=True)
    right = gradients(model)
    tile_blocks(model, above=TILE)
    gradients(model)  # in the first backward layers find out
    for module in (recompute, lora_linear):
        monkeypatch.setattr(module, "empty", lambda shape, like: like.new_full(shape, torch.nan))
    seen = widest_block(model)
    loss, found = gradients(model)
    layers = sum(map(is_gated_block, model.modules()))
    assert len(seen) == calls * layers * -(-IDS.numel() // TILE)
    assert loss == pytest.approx(right[0], abs=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right[1][name], atol=1e-6, rtol=1e-5)


def test_short_rows_before_long_ones_decide_nothing():
    model = tiny("llama").train()
    enable_checkpointing(model, every_layer=True, one_node=True)
    right = gradients(model)
    tile_blocks(model, above=TILE)
    gradients(model, IDS[:, : TILE - 1])
    seen = widest_block(model)
    for _ in range(2):
        loss, found = gradients(model)
        assert loss == pytest.approx(right[0], abs=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, right[1][name], atol=1e-6, rtol=1e-5)
    layers, tiles = sum(map(is_gated_block, model.modules())), -(-IDS.numel() // TILE)
    assert len(seen) == (3 + 2) * layers * tiles


@pytest.mark.parametrize("checkpointed", [False, True])
def test_tiles_of_blocks_with_adapters_are_one_node_each(checkpointed, monkeypatch):
    model = attach_adapter(tiny("qwen3").train(), AdapterSection(kind="lora", rank=4, target_linear=True))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1)
    right = gradients(model)
    add_adapters_in_place(model)
    fuse_layers(model)
    if checkpointed:
        enable_checkpointing(model, every_layer=True, one_node=True)
    tile_blocks(model, above=TILE)
    gradients(model)
    rows = []
    apply = lora_linear.LowRankGated.apply
    monkeypatch.setattr(lora_linear.LowRankGated, "apply", lambda *args: rows.append(len(args[2])) or apply(*args))
    loss, found = gradients(model)
    layers, tiles = sum(map(is_gated_block, model.modules())), -(-IDS.numel() // TILE)
    assert len(rows) == 2 * layers * tiles
    assert max(rows) == TILE
    assert loss == pytest.approx(right[0], abs=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right[1][name], atol=1e-5, rtol=1e-5)


def test_dropout_inside_a_tile_is_drawn_once():
    """The recomputation of a tile draws what its forward drew: a step repeats with the same seed."""
    model = attach_adapter(tiny("llama"), AdapterSection(kind="lora", rank=4, target_linear=True, dropout=0.5)).train()
    enable_checkpointing(model, every_layer=True)
    tile_blocks(model, above=TILE)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(gradients(model))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], gradient) for name, gradient in results[1][1].items())


def test_short_rows_and_forwards_without_gradients():
    model = tiny("llama").eval()
    with torch.no_grad():
        right = model(input_ids=IDS).logits
        tile_blocks(model, above=3 * TILE)
        seen = widest_block(model)
        model(input_ids=IDS[:, : 3 * TILE])
        assert max(seen) == 3 * TILE
        seen.clear()
        torch.testing.assert_close(model(input_ids=IDS).logits, right, atol=1e-6, rtol=1e-5)
        assert max(seen) == TILE
        padded = IDS[:, :30].reshape(3, 10)
        seen.clear()
        model(input_ids=padded)
        assert max(seen) == TILE


def test_a_copy_computes_with_its_weights():
    model = tiny("llama").eval()
    tile_blocks(model, above=TILE)
    twin = copy.deepcopy(model)
    before = model(input_ids=IDS).logits
    for module in twin.modules():
        if is_gated_block(module):
            module.down_proj.weight.data.zero_()
    assert are_tiled(twin)
    assert not torch.allclose(twin(input_ids=IDS).logits, before)
    torch.testing.assert_close(model(input_ids=IDS).logits, before)


def test_models_without_gated_blocks_are_left_alone():
    model = tiny("phi")
    assert not tile_blocks(model, above=TILE)
    assert not are_tiled(model)
