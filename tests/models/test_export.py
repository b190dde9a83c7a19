"""Weights written for a server."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tiny_models import drawn, tiny
from upweight.errors import UserError
from upweight.models.export import exported_weights, refuse_unmergeable, write_weights
from upweight.models.precision import set_up_precision

CASES = {
    "plain": ("llama", {}, {}),
    "head in full": ("llama", {"modules_to_save": ["lm_head"]}, {}),
    "tied": ("llama", {}, {"tie_word_embeddings": True}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, {}),
    "experts": ("qwen3_moe", {}, {}),
    "rslora": ("llama", {"use_rslora": True}, {}),
}


def adapted(kind, options, changes):
    torch.manual_seed(0)
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    return get_peft_model(tiny(kind, **changes), LoraConfig(**given))


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_compute_the_same_and_the_policy_is_untouched(case, tmp_path):
    model = adapted(*CASES[case])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_weights(model, tmp_path, torch.float32)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([drawn(1, 20).tolist()])
    with torch.no_grad():
        assert (found(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() < 2e-5


@pytest.mark.parametrize("adapter", [True, False])
def test_bfloat16_stays_bfloat16(adapter, tmp_path):
    model = adapted("llama", {}, {}) if adapter else tiny("llama")
    copies = set_up_precision(model, torch.bfloat16)
    assert copies is not None
    write_weights(model, tmp_path, torch.bfloat16)
    weights = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert set(weights) == set(tiny("llama").state_dict())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_without_a_folder_is_what_would_be_written(case, adapter, precision, tmp_path):
    kind, options, changes = CASES[case]
    model = adapted(kind, options, changes) if adapter else tiny(kind, **changes)
    set_up_precision(model, precision)
    write_weights(model, tmp_path, precision)
    written = load_file(tmp_path / "model.safetensors")
    sent = dict(exported_weights(model, precision))
    if case == "tied":
        written.pop("lm_head.weight", None)  # a file may have it twice
    assert sent.keys() == written.keys()
    assert all(torch.equal(value, written[name]) and value.dtype == written[name].dtype for name, value in sent.items())


def test_what_cannot_be_merged_is_refused():
    with pytest.raises(UserError, match="peft_use_dora"):
        refuse_unmergeable(adapted("llama", {"use_dora": True}, {}))
