"""Weights written to a folder or for a server."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tiny_models import drawn, tiny
from upweight.errors import UserError
from upweight.models.export import exported_weights, refuse_unmergeable, save_model, write_weights
from upweight.models.precision import set_up_precision

BF16 = torch.bfloat16
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


def test_an_adapter_is_saved_without_warnings_of_peft(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = adapted("llama", {"target_modules": ["q_proj", "embed_tokens"]}, {})
    model.peft_config["default"].base_model_name_or_path = "nobody/nothing"
    save_model(model, tmp_path, BF16)
    model = adapted("llama", {}, {})
    model.peft_config["default"].base_model_name_or_path = "nobody/nothing"
    save_model(model, tmp_path, BF16)
    assert [str(one.message) for one in recwarn if "peft" in one.filename] == []


def test_an_adapter_is_saved_with_an_empty_offline_switch(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = adapted("llama", {}, {})
    model.peft_config["default"].base_model_name_or_path = "nobody/nothing"
    save_model(model, tmp_path, BF16)
    assert (tmp_path / "adapter_model.safetensors").is_file()


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


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
def test_an_adapter_that_trains_tied_weights_apart_is_not_merged_for_a_server_that_ties_them(options):
    refuse_unmergeable(adapted("llama", options, {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"trains lm_head\.weight and model\.embed_tokens\.weight apart"):
        refuse_unmergeable(adapted("llama", options, {"tie_word_embeddings": True}))


def test_of_two_active_adapters_none_is_left_out_in_silence():
    model = adapted("llama", {}, {})
    model.add_adapter("second", LoraConfig(target_modules=["q_proj"]))
    refuse_unmergeable(model)
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UserError, match="default and second are active"):
        refuse_unmergeable(model)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_tied_weights_that_are_both_trained_in_full_are_merged(dtype):
    both = {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    model = adapted("llama", both, {"tie_word_embeddings": True})
    set_up_precision(model, dtype)
    refuse_unmergeable(model)
    saved = model.get_base_model().lm_head.modules_to_save["default"].weight
    assert torch.equal(dict(exported_weights(model, torch.float32))["model.embed_tokens.weight"], saved)


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
