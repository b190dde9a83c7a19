"""Sharing prefixes changes the cost, not the numbers: trees against each sequence alone, forward and backward."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tiny_models import (
    PADDED,
    SHAPES,
    TREES,
    TREES_TOO,
    gradients,
    group,
    plain_statistics,
    relative_difference,
    three_levels,
    tiny,
    weighted,
)
from upweight.engine import Engine
from upweight.engine.activations import enable_checkpointing
from upweight.engine.packing import build_batch, plan_rows

STATISTICS = frozenset({"entropy_T"})


def forwarded(engine, model, units, **options):
    out = engine(model, build_batch(units, layout=engine.layout, **options), STATISTICS)
    return {"logps_T": out.logps_T, "entropy_T": out.entropy_T}


def assert_equal(model, found, plain, slopes, limit=1e-5):
    for name, value in found.items():
        torch.testing.assert_close(value, plain[name], atol=limit, rtol=0)
    assert relative_difference(gradients(model, weighted(found)), slopes) < limit


def compare(model, shapes, limit=1e-5):
    """Every shape by plain forwards first, then through the engine; returns the engine."""
    plain = {shape: plain_statistics(model, SHAPES[shape]()) for shape in shapes}
    slopes = {shape: gradients(model, weighted(plain[shape])) for shape in shapes}
    engine = Engine(model)
    for shape in shapes:
        found = forwarded(engine, model, SHAPES[shape](), pad_to=lambda n: n + 2)
        assert_equal(model, found, plain[shape], slopes[shape], limit)
    return engine


@pytest.mark.parametrize("kind", TREES)
def test_trees_equal_sequences(kind):
    assert compare(tiny(kind), SHAPES).layout == "tree"


@pytest.mark.parametrize("kind", TREES_TOO)
def test_sinks_chunks_scales_and_biases(kind):
    assert compare(tiny(kind), ["three_levels"]).layout == "tree"


@pytest.mark.parametrize("kind", PADDED)
def test_what_cannot_share_is_padded_and_right(kind):
    # the scan of state-space layers rounds differently for other paddings
    assert compare(tiny(kind), ["group", "three_levels", "empty_prompts"], limit=5e-5).layout == "padded"


def test_a_window_sees_across_a_branch_point_and_no_further():
    model = tiny("mistral")
    plain = plain_statistics(model, group())["logps_T"]
    model.config.sliding_window += 1
    other = plain_statistics(model, group())["logps_T"]
    assert float((plain - other).detach().abs().max()) > 0.01, "the window matters for these sequences"


@pytest.mark.parametrize("budget", [14, 20, 1000])
def test_groups_split_over_rows_add_up(budget):
    model, units = tiny("llama"), group() + three_levels()
    plain = plain_statistics(model, units)["logps_T"]
    weights = torch.randn(len(plain), generator=torch.Generator().manual_seed(3))
    slopes = gradients(model, (plain * weights).sum())
    engine = Engine(model)
    (rows,) = plan_rows(units, budget)
    assert (len(rows) == 1) == (budget == 1000)
    counts = [sum(int(s.loss_mask.sum()) for s in unit.samples) for unit in units]
    of_unit = weights.split(counts)
    loss = torch.zeros(())
    for row in rows:
        logps = engine(model, build_batch([units[u] for u in row])).logps_T
        loss = loss + (logps * torch.cat([of_unit[u] for u in row])).sum()
    assert relative_difference(gradients(model, loss), slopes) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_recomputed_activations_see_the_same_trees(kind, reentrant):
    model, units = tiny(kind).train(), three_levels()
    plain = plain_statistics(model, units)
    slopes = gradients(model, weighted(plain))
    engine = Engine(model)
    enable_checkpointing(model, reentrant)
    found = forwarded(engine, model, units)
    forwarded(engine, model, group())  # a later forward must not disturb the recomputation of an earlier one
    assert_equal(model, found, plain, slopes)


@pytest.mark.parametrize("reentrant", [True, False, None])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "down_proj"], ["k_proj", "lm_head"]])
def test_adapters(targets, reentrant):
    model = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    units = three_levels()
    plain = plain_statistics(model, units)
    slopes = gradients(model, weighted(plain))
    engine = Engine(model)
    if reentrant is not None:
        model.train()
        enable_checkpointing(model, reentrant)
    assert_equal(model, forwarded(engine, model, units), plain, slopes)
    with torch.no_grad(), model.disable_adapter():
        without = forwarded(engine, model, units)["logps_T"]
        torch.testing.assert_close(without, plain_statistics(model, units)["logps_T"], atol=1e-5, rtol=0)
    assert float((without - plain["logps_T"].detach()).abs().max()) > 0.01


def test_a_trained_copy_of_the_head():
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model, units = get_peft_model(tiny("qwen2"), config), three_levels()
    plain = plain_statistics(model, units)
    slopes = gradients(model, weighted(plain))
    assert any("lm_head" in name for name in slopes)
    assert_equal(model, forwarded(Engine(model), model, units), plain, slopes)


def test_tied_embeddings():
    model = tiny("qwen3", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    compare(model, ["three_levels"])
