import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tiny_models import tiny
from upweight.models.precision import set_up_precision
from upweight.models.save import save_model

BF16 = torch.bfloat16


def half(kind: str):
    """As `from_pretrained` loads it: weights in half precision, rotary frequencies not."""
    model = tiny(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma2"])
def test_full_weights_are_written_in_the_compute_dtype(tmp_path, kind):
    model = half(kind)
    set_up_precision(model, BF16)
    save_model(model, tmp_path, BF16)
    written = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in written.values()} == {BF16}
    assert not written.keys() & model.all_tied_weights_keys.keys()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    # by its own choice transformers before 5.21 takes an SDPA without Gemma 2's soft cap
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", attn_implementation=model.config._attn_implementation
    )
    ids = torch.arange(10).view(1, -1)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_weights_kept_in_float32_are_written_so(tmp_path):
    model = tiny("llama").to(BF16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    set_up_precision(model, BF16)
    save_model(model, tmp_path, BF16)
    dtypes = {name: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert dtypes.pop("model.norm.weight") == torch.float32
    assert set(dtypes.values()) == {BF16}


def test_adapters_are_written_as_float32_masters(tmp_path):
    model = get_peft_model(tiny("llama").to(BF16), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    set_up_precision(model, BF16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_()
    save_model(model, tmp_path, BF16)
    again = PeftModel.from_pretrained(tiny("llama").to(BF16), tmp_path)
    for name, parameter in again.named_parameters():
        if name in trained:
            assert torch.equal(parameter, trained[name])


def test_a_gathered_state_dict_is_cast_too(tmp_path):
    model = tiny("llama")
    save_model(model, tmp_path, BF16, state_dict=model.state_dict())
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {BF16}
