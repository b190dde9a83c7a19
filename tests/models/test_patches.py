import copy
import inspect
from importlib.metadata import requires

import pytest
import torch
from packaging.requirements import Requirement
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.utils.other import check_file_exists_on_hf_hub
from transformers import PreTrainedModel

from tiny_models import gradients, relative_difference, tiny
from upweight.models.patches import add_adapters_in_place, keep_soft_cap, rope_row_lengths, scale_rope_by_row_length

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(kind="qwen2", **settings):
    """A model with an adapter that changes what it computes."""
    model = get_peft_model(tiny(kind), LoraConfig(r=4, lora_alpha=12, target_modules=LINEAR, **settings))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def outcome(model, **arguments):
    """Logits and gradients of a fixed loss; dropout draws the same numbers each time."""
    torch.manual_seed(2)
    ids = torch.randint(0, 60, (2, 9))
    logits = model(input_ids=ids, **arguments).logits
    return logits, gradients(model, (logits * torch.randn(logits.shape)).sum())


@pytest.mark.parametrize(
    "settings", [{}, {"lora_dropout": 0.3}, {"use_dora": True}, {"use_rslora": True}, {"lora_bias": True}], ids=str
)
def test_the_sum_stays_the_same(settings):
    model = adapted(**settings).train()
    logits, right = outcome(model)
    add_adapters_in_place(model)
    found, grads = outcome(model)
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    assert relative_difference(grads, right) < 1e-5


def test_the_low_rank_product_is_what_runs(monkeypatch):
    model = adapted(lora_dropout=0.3)
    add_adapters_in_place(model)
    layer = next(module for module in model.modules() if isinstance(module, LoraLinear))
    calls = []
    monkeypatch.setitem(layer.__dict__, "_stock_forward", lambda x: calls.append(x) or torch.zeros(2, 3, 64))
    x = torch.randn(2, 3, layer.in_features)
    layer.eval()(x)
    assert not calls
    layer.train()(x)  # dropout comes between
    with model.disable_adapter():
        layer.eval()(x)
    assert len(calls) == 2


def test_frozen_adapters_and_inputs_without_gradient():
    model = adapted()
    add_adapters_in_place(model)
    model.requires_grad_(False)
    assert not model(input_ids=torch.tensor([[1, 2, 3]])).logits.requires_grad


def test_adapters_merge_switch_off_and_are_copied_as_before():
    model = adapted()
    with model.disable_adapter():
        off = outcome_without_gradient(model)
    right = outcome_without_gradient(model)
    add_adapters_in_place(model)
    add_adapters_in_place(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    torch.testing.assert_close(outcome_without_gradient(twin), right, atol=1e-4, rtol=1e-4)
    with twin.disable_adapter():
        torch.testing.assert_close(outcome_without_gradient(twin), off)
    merged = twin.merge_and_unload()
    torch.testing.assert_close(outcome_without_gradient(merged), right, atol=1e-3, rtol=1e-3)


def outcome_without_gradient(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 9)[None]).logits


def test_peft_still_adds_the_term_by_itself():
    """When PEFT scales and adds inside the product, `add_adapters_in_place` can go."""
    assert "result = result + lora_B(lora_A(dropout(x))) * scaling" in inspect.getsource(LoraLinear.forward)


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_a_soft_cap_is_kept_and_other_attention_left_alone(kind):
    model = tiny(kind)
    right = outcome_without_gradient(model)
    model.config._attn_implementation_internal = "sdpa"
    keep_soft_cap(model)
    assert model.config._attn_implementation == ("eager" if kind == "gemma2" else "sdpa")
    torch.testing.assert_close(outcome_without_gradient(model), right, atol=1e-4, rtol=1e-4)


def test_a_supported_transformers_still_drops_soft_caps():
    """When the oldest supported transformers is 5.21, which refuses SDPA for Gemma 2, `keep_soft_cap` can go."""
    (needed,) = (text for text in requires("upweight") or [] if text.startswith("transformers"))
    assert Requirement(needed).specifier.contains("5.20.0")


def test_peft_still_raises_where_the_offline_switch_is_empty(monkeypatch):
    """When this fails, PEFT reads an empty HF_HUB_OFFLINE as the hub does: `spell_out_offline` can go."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    with pytest.raises(ValueError, match="invalid truth value"):
        check_file_exists_on_hf_hub("nobody/nothing", "config.json")


def test_a_supported_torch_still_waits_for_the_head_of_a_shard_group():
    """When the oldest supported torch is 2.13, which ends such groups by itself, `end_shard_group` can go."""
    (needed,) = (text for text in requires("upweight") or [] if Requirement(text).name == "torch")
    assert Requirement(needed).specifier.contains("2.11.0")


def test_rotary_scales_still_follow_the_batch_in_transformers():
    """When this fails, a row's own length decides in transformers too: `scale_rope_by_row_length` can go."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("llama", max_position_embeddings=8, rope_parameters=rope)
    ids = torch.randint(3, 60, (1, 12))
    alone = model(input_ids=ids).logits
    wide = torch.cat([torch.cat([ids, torch.zeros_like(ids)], 1), torch.randint(3, 60, (1, 24))])
    mask = (torch.arange(24) < torch.tensor([[12], [24]])).long()
    assert not torch.allclose(model(input_ids=wide, attention_mask=mask).logits[:1, :12], alone, atol=1e-3)
    assert not torch.allclose(model(input_ids=ids).logits, alone, atol=1e-3)
    scale_rope_by_row_length(model)
    assert torch.allclose(model(input_ids=ids).logits, alone, atol=1e-5)
    with rope_row_lengths(torch.tensor([12, 24])):
        assert torch.allclose(model(input_ids=wide, attention_mask=mask).logits[:1, :12], alone, atol=1e-5)


def test_transformers_takes_no_checkpoint_function():
    """`recompute_in_one_node` can go once `gradient_checkpointing_enable` takes the function that layers call."""
    parameters = inspect.signature(PreTrainedModel.gradient_checkpointing_enable).parameters
    assert not [name for name in parameters if "func" in name]
