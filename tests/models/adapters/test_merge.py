import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from made_gguf import write_gguf
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.models.adapters.merge import AdapterFolder, merge_adapter, merge_by_file, merge_error
from upweight.models.load import load_model
from upweight.runs.checkpoints import mark_whole

IDS = torch.arange(3, 19).view(1, -1)


def made_base(kind, **changes):
    if kind != "gpt2":
        return tiny(kind, **changes)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **changes))


def adapted(
    folder, *, kind="llama", dtype=torch.float32, shards="1GB", auto=AutoModelForCausalLM, task="CAUSAL_LM", **lora
):
    """A base model and a random adapter for it, saved; the logits that the two give together."""
    tokenizer = byte_tokenizer("chatml")
    options = {"num_labels": 1} if task == "SEQ_CLS" else {}
    tie = lora.pop("tied", False)
    made = made_base(kind, vocab_size=len(tokenizer), pad_token_id=0, tie_word_embeddings=tie).to(dtype)
    made.save_pretrained(folder / "base", max_shard_size=shards)
    tokenizer.save_pretrained(folder / "base")
    base = auto.from_pretrained(folder / "base", dtype=dtype, **options).eval()
    torch.manual_seed(7)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **lora}
    model = get_peft_model(base, LoraConfig(task_type=task, **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name or "magnitude" in name:
                weight.mul_(1.3).add_(0.01)
    model.save_pretrained(folder / "adapter")
    tokenizer.save_pretrained(folder / "adapter")
    return AdapterFolder(ModelSection(base_model=str(folder / "base")), folder / "adapter"), model.eval()(
        input_ids=IDS
    ).logits


WAYS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 11}},
    "head and embedding trained in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "transposed weights": {"kind": "gpt2", "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "embedding adapted": {"target_modules": ["embed_tokens", "q_proj"]},
    "tied, both trained in full": {
        "tied": True, "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shards", ["1GB", "30KB"])
def test_file_by_file_gives_what_the_adapter_gave(tmp_path, way, shards):
    what, right = adapted(tmp_path, shards=shards, **WAYS[way])
    out = tmp_path / "partial"
    out.mkdir()
    assert merge_by_file(what.base, "tokens", what.folder, 1, out) is None
    merged, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.allclose(merged.eval()(input_ids=IDS).logits, right, atol=1e-4)
    assert bool((out / "model.safetensors.index.json").exists()) == (shards == "30KB")


def test_memory_holds_one_file_at_a_time(tmp_path, monkeypatch):
    what, _ = adapted(tmp_path, shards="30KB")
    held = []
    monkeypatch.setattr(
        "upweight.models.adapters.merge.save_file",
        lambda weights, *a, **k: held.append(sum(w.numel() * w.element_size() for w in weights.values())),
    )
    merge_by_file(what.base, "tokens", what.folder, 1, tmp_path)
    largest = max(w.numel() * 4 for w in load_all(tmp_path / "base").values())
    assert len(held) > 2
    assert max(held) <= max(30_000, largest)


def load_all(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_merged_folder_is_whole_and_in_the_dtype_of_the_base(tmp_path):
    what, _ = adapted(tmp_path, dtype=torch.bfloat16)
    merge_adapter(what, tmp_path / "merged")
    assert {value.dtype for value in load_all(tmp_path / "merged").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()
    assert not list(tmp_path.glob("*.partial"))
    assert 0 < merge_error(what, tmp_path / "merged") < 0.5
    with pytest.raises(UserError, match="has this adapter in it already"):
        merge_adapter(what, tmp_path / "merged")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="exists already"):
        merge_adapter(what, tmp_path / "other")


def test_difference_sees_a_merge_that_went_wrong(tmp_path):
    what, _ = adapted(tmp_path)
    merge_adapter(what, tmp_path / "merged")
    assert merge_error(what, tmp_path / "merged") < 1e-3
    assert merge_error(what, tmp_path / "base") > 0.05


@pytest.mark.parametrize(
    "way", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}]
)
def test_changing_one_of_two_tied_weights_unties_them(tmp_path, way):
    what, right = adapted(tmp_path, tied=True, **way)
    merge_adapter(what, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not merged.config.tie_word_embeddings
    assert torch.allclose(merged(input_ids=IDS).logits, right, atol=1e-4)


def test_tied_weights_that_are_not_touched_stay_tied_in_a_model_that_is_merged_whole(tmp_path, recwarn):
    what, right = adapted(tmp_path, kind="qwen3_moe", tied=True)
    merge_adapter(what, tmp_path / "merged")
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    assert not report["missing_keys"]
    assert torch.allclose(merged.eval()(input_ids=IDS).logits, right, atol=1e-4)
    assert not [one for one in recwarn if "no longer tied" in str(one.message)]


def test_a_reward_model_brings_its_head(tmp_path):
    what, right = adapted(tmp_path, auto=AutoModelForSequenceClassification, task="SEQ_CLS")
    merge_adapter(what, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=IDS).logits, right, atol=1e-5)
    assert "lm_head.weight" not in load_all(tmp_path / "merged")
    assert merge_error(what, tmp_path / "merged") < 1e-4


def test_files_that_name_weights_otherwise_are_merged_whole(tmp_path):
    what, right = adapted(tmp_path, kind="qwen3_moe")
    merge_adapter(what, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=IDS).logits, right, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_merged_experts_answer_as_their_adapters_do(tmp_path, kind):
    experts = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    what, right = adapted(tmp_path, kind=kind, **experts)
    merge_adapter(what, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=IDS).logits, right, atol=1e-3)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(UserError, match="adapter_config"):
        AdapterFolder(ModelSection(base_model="x"), tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    what, _ = adapted(tmp_path)
    mark_whole(what.folder)
    weights = bytearray((what.folder / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (what.folder / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"is damaged: adapter_model\.safetensors holds other bytes"):
        AdapterFolder(what.base, what.folder)


def test_weights_that_are_stored_quantised_are_refused(tmp_path):
    what, _ = adapted(tmp_path)
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match="unquantised"):
        merge_adapter(what, tmp_path / "merged")


def test_new_tokens_come_along(tmp_path):
    what, _ = adapted(tmp_path, modules_to_save=["embed_tokens", "lm_head"])
    tokenizer = byte_tokenizer("chatml")
    tokenizer.add_tokens(["<new>", "<other>"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(len(tokenizer))
    settings = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    model: PeftModel = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings))
    model.save_pretrained(tmp_path / "grown")
    tokenizer.save_pretrained(tmp_path / "grown")
    right = model.eval()(input_ids=torch.tensor([[len(tokenizer) - 1, 5, 6]])).logits
    merge_adapter(AdapterFolder(what.base, tmp_path / "grown"), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=torch.tensor([[len(tokenizer) - 1, 5, 6]])).logits, right, atol=1e-4)


def test_a_gguf_base_is_unpacked_and_merged_whole(tmp_path):
    pytest.importorskip("gguf")
    tokenizer = byte_tokenizer("chatml")
    write_gguf(tiny("llama", vocab_size=len(tokenizer), tie_word_embeddings=False), tmp_path / "tiny.gguf")
    section = ModelSection(base_model=str(tmp_path), gguf_file="tiny.gguf", bf16=False)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(load_model(section, torch.float32), lora)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    right = model.eval()(input_ids=IDS).logits
    what = AdapterFolder(section, tmp_path / "adapter")
    merge_adapter(what, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(merged(input_ids=IDS).logits, right, atol=1e-4)
