"""Low-rank products with weights in 4 bits, beside PEFT's forward of the same layers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tiny_models import gradients, relative_difference, tiny
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.models.kernels.lora_linear import LowRankLinear, plain_adapter
from upweight.models.load import load_model
from upweight.models.patches import add_adapters_in_place

pytest.importorskip("bitsandbytes")  # `make test-quant`

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(2))


def packed_model(folder, dtype=torch.float32, **settings):
    tiny("qwen2", num_hidden_layers=2).save_pretrained(folder)
    section = AdapterSection(kind="qlora", load_in_4bit=True)
    base = load_model(ModelSection(base_model=str(folder)), dtype, adapter=section)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=LINEAR, init_lora_weights=False, **settings)
    return get_peft_model(base, config).train()


def outcome(model):
    logits = model(input_ids=IDS).logits
    return logits.detach(), gradients(model, logits.log_softmax(-1)[..., 5].sum())


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=str)
def test_packed_layers_with_adapters_compute_the_same(settings, tmp_path, monkeypatch):
    model = packed_model(tmp_path, **settings)
    logits, right = outcome(model)
    add_adapters_in_place(model)
    calls = []
    apply = LowRankLinear.apply
    monkeypatch.setattr(LowRankLinear, "apply", lambda *args: calls.append(1) or apply(*args))
    out, grads = outcome(model)
    torch.testing.assert_close(out, logits, atol=1e-4, rtol=1e-4)
    assert relative_difference(grads, right) < 1e-5
    assert len(calls) == (0 if settings else 2 * len(LINEAR))


def test_packed_bytes_are_all_that_is_kept_of_a_weight(tmp_path):
    model = packed_model(tmp_path)
    add_adapters_in_place(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        model(input_ids=IDS)
    layer = next(module for name, module in model.named_modules() if name.endswith("gate_proj"))
    assert not any(one.is_floating_point() and one.shape == (layer.out_features, layer.in_features) for one in kept)


def test_layers_that_compute_in_another_dtype_run_pefts_forward(tmp_path):
    model = packed_model(tmp_path)
    layer = next(module for name, module in model.named_modules() if name.endswith("gate_proj"))
    x = torch.randn(3, layer.in_features)
    assert plain_adapter(layer, x) is not None
    layer.base_layer.compute_dtype = torch.bfloat16
    assert plain_adapter(layer, x) is None
