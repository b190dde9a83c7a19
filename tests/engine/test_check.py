import dataclasses
import warnings

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from tiny_models import PADDED, SIZES, drawn, group, identical, sample, three_levels, tiny
from upweight.engine import Engine
from upweight.engine.activations import enable_checkpointing
from upweight.engine.attention.interface import TreeRule
from upweight.engine.check import (
    ParityCheck,
    check_first_batch,
    check_first_gradients,
    gradients_flow,
    require_gradients,
)
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.types import Unit


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", *PADDED])
def test_a_right_forward_passes(kind):
    model = tiny(kind)
    engine = Engine(model)
    for units in (three_levels(), identical(), []):
        check = check_first_batch(engine, model, build_batch(units, engine.layout))
        assert check.difference < 5e-5
        check.require()


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_scores_are_checked_with_dropout_off(task):
    model = tiny("llama", getattr(hf, f"AutoModelFor{task}"), num_labels=1).train()
    engine = Engine(model)
    assert check_first_batch(engine, model, build_batch(group(), predict=False)).difference < 1e-5
    assert model.training
    assert model.model.layers[0].training


def test_a_wrong_mask_is_caught():
    model = tiny("llama")
    engine = Engine(model)
    batch = build_batch(group())
    blind = torch.arange(1, batch.ids_BN.shape[1] + 1)[None]
    found = engine(model, batch)
    # the comparison sees the right tree, the forward one in which nobody sees a prefix
    spoilt = dataclasses.replace(batch, end_BN=torch.where(batch.end_BN == batch.end_BN.max(), batch.end_BN, blind))
    assert not torch.allclose(engine(model, spoilt).logps_T, found.logps_T, atol=1e-2)
    shifted = dataclasses.replace(batch, position_BN=batch.position_BN.flip(1))
    check = check_first_batch(engine, model, shifted)
    assert not check.passed
    with pytest.raises(UserError, match="layout: padded"):
        check.require()


def test_half_precision_is_judged_by_the_mean():
    model = tiny("llama").bfloat16()
    engine = Engine(model)
    assert check_first_batch(engine, model, build_batch(group())).limit == 0.15
    assert check_first_batch(engine, model, build_batch(group()), torch.float32).limit == 1e-4
    assert not ParityCheck(float("nan"), 0.05).passed
    model.register_parameter("packed", nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))
    assert check_first_batch(engine, model, build_batch(group()), torch.float32).limit == 0.15
    assert check_first_gradients(engine, model, build_batch(group()), torch.float32).limit == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "adapter", "mamba", "scores"])
def test_gradients_are_those_of_plain_forwards_and_nothing_is_left_behind(kind, dtype):
    auto = {"auto": hf.AutoModelForTokenClassification, "num_labels": 2} if kind == "scores" else {}
    model = tiny({"adapter": "llama", "scores": "llama"}.get(kind, kind), **auto).train().to(dtype)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    engine = Engine(model)
    batch = build_batch(three_levels(), engine.layout, predict=kind != "scores")
    check = check_first_gradients(engine, model, batch, dtype)
    assert check.difference < (1e-5 if dtype == torch.float32 else 0.05)
    check.require()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_a_backward_that_is_cut_is_caught():
    model = tiny("llama")
    engine = Engine(model)
    for layer in model.model.layers[1:2]:
        stock = layer.forward
        layer.forward = lambda hidden, stock=stock, **kwargs: (  # only where rows are packed
            stock(hidden.detach() if isinstance(kwargs["attention_mask"], TreeRule) else hidden, **kwargs)
        )
    assert check_first_batch(engine, model, build_batch(group())).passed
    check = check_first_gradients(engine, model, build_batch(group()), torch.float32)
    with pytest.raises(UserError, match="gradients differ"):
        check.require()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_reach_adapters_through_checkpointing(reentrant):
    model = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"])).train()
    engine = Engine(model)
    with warnings.catch_warnings(record=True) as shown:
        enable_checkpointing(model, reentrant)
        with torch.no_grad(), model.disable_adapter():  # as a reference is computed
            engine(model, build_batch(group()))
        engine(model, build_batch(group())).logps_T.sum().backward()
    assert gradients_flow(model)
    assert not [one for one in shown if "requires_grad" in str(one.message)]


def test_adapters_without_gradients_are_reported():
    model = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["q_proj"])).train()
    assert not gradients_flow(model)
    require_gradients(True)
    with pytest.raises(UserError, match="gradient"):
        require_gradients(False)


def test_scores_are_compared_with_the_models_own_forward():
    model = tiny("llama", hf.AutoModelForSequenceClassification, num_labels=1)
    engine = Engine(model)
    stock = model.score.forward
    model.score.forward = lambda hidden: stock(hidden) * (2.0 if hidden.shape[1] == 1 else 1.0)
    check = check_first_batch(engine, model, build_batch(group(), predict=False))
    assert not check.passed
    assert check.what == "scores"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_wrong_at_the_end_of_a_row_only_is_caught(dtype):
    model = tiny("llama").to(dtype)
    engine = Engine(model)
    units = [Unit((sample(drawn(60 + n, 20), prompt=4),)) for n in range(16)]
    batch = build_batch(units)
    layer = model.model.layers[1]
    stock = layer.forward

    def by_place(hidden, **kwargs):  # as a layer does that takes positions from the shape
        late = torch.arange(hidden.shape[1]) >= 280
        return stock(torch.where(late[:, None], hidden * 0.5, hidden), **kwargs)

    assert check_first_batch(engine, model, batch).passed
    layer.forward = by_place
    assert not check_first_batch(engine, model, batch).passed


def test_a_model_that_reads_both_ways_is_no_language_model():
    config = hf.BertConfig(**{name: SIZES[name] for name in SIZES if name != "num_key_value_heads"})
    torch.manual_seed(0)
    model = hf.BertLMHeadModel(config).eval()
    with pytest.raises(UserError, match="not causal"):
        Engine(model)(model, build_batch(group()))
    padded = Engine(model, layout="padded")
    check = check_first_batch(padded, model, build_batch(group(), "padded"))
    with pytest.raises(UserError, match=r"both directions.*causal language model"):
        check.require()


def test_the_advice_is_one_that_can_be_followed():
    model = tiny("llama")
    engine = Engine(model, layout="padded")
    batch = build_batch(group(), "padded")
    spoilt = dataclasses.replace(batch, target_T=batch.target_T.flip(0))
    model.model.layers[0].register_forward_hook(lambda module, args, out: out * (2 if len(out) > 1 else 1))
    check = check_first_batch(engine, model, spoilt)
    with pytest.raises(UserError, match="padded already") as error:
        check.require()
    assert "layout" not in str(error.value)
