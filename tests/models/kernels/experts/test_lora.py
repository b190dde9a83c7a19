"""Adapters of fused experts as grouped products against PEFT's copy of all experts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tiny_models import gradients, relative_difference, tiny
from upweight.models.kernels.experts.grouped import group_experts
from upweight.models.kernels.experts.lora import add_expert_adapters

BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(kind, parameters=BOTH, rank=4):
    torch.manual_seed(1)
    config = LoraConfig(r=rank, lora_alpha=12, target_modules=[], target_parameters=parameters, init_lora_weights=False)
    return get_peft_model(tiny(kind, num_hidden_layers=2), config)


def outputs(model):
    ids = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(2))
    logits = model(input_ids=ids).logits
    return logits.detach(), gradients(model, logits.log_softmax(-1)[..., 5].sum())


@pytest.mark.parametrize("parameters", [BOTH, BOTH[1:]])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe"])
def test_grouped_products_equal_pefts_copy(kind, parameters, monkeypatch):
    model = adapted(kind, parameters)
    plain, plain_gradients = outputs(model)
    group_experts(model)
    add_expert_adapters(model)
    copies = []
    monkeypatch.setattr("peft.tuners.lora.layer.ParamWrapper._activate_lora", lambda *_: copies.append(1))
    ours, our_gradients = outputs(model)
    assert not copies
    torch.testing.assert_close(ours, plain, atol=2e-4, rtol=1e-4)
    assert relative_difference(our_gradients, plain_gradients) < 1e-4


def test_other_cases_run_pefts_forward():
    model = adapted("qwen3_moe", rank=3)  # which grouped products cannot take
    plain = outputs(model)
    group_experts(model)
    add_expert_adapters(model)
    assert torch.equal(outputs(model)[0], plain[0])
    model = adapted("qwen3_moe")
    group_experts(model)
    add_expert_adapters(model)
    with torch.no_grad(), model.disable_adapter():
        off = model(input_ids=torch.arange(3, 9)[None]).logits
    base = tiny("qwen3_moe", num_hidden_layers=2)(input_ids=torch.arange(3, 9)[None]).logits
    torch.testing.assert_close(off, base)
    with torch.no_grad():
        before = model(input_ids=torch.arange(3, 9)[None]).logits
        merged = model.merge_and_unload()(input_ids=torch.arange(3, 9)[None]).logits
    torch.testing.assert_close(merged, before, atol=2e-4, rtol=1e-4)
