import importlib.util
import inspect
import json
import logging
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from made_gguf import write_gguf
from made_runs import write_model
from tiny_models import VOCABULARY, tiny
from upweight.config.rules.model import BITSANDBYTES
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.errors import UserError
from upweight.heartbeat import _activities
from upweight.log import _warned
from upweight.models import load
from upweight.models.load import (
    compute_dtype,
    config_with_head,
    disable_dropout,
    dtype_of_weights,
    load_failures,
    load_model,
    load_model_config,
    master_dtype,
    model_without_weights,
)
from upweight.models.precision import set_up_precision

CPU = torch.device("cpu")


def tokenizer(size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    vocabulary = {f"t{index}": index for index in range(size)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0", eos_token="t2", pad_token="t3")


@pytest.fixture
def folder(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"bf16": False}, torch.float32),
        ({"fp16": True}, torch.float16),
        ({"pure_bf16": True}, torch.bfloat16),
    ],
)
def test_the_dtype_on_a_cpu(settings, dtype):
    assert compute_dtype(ModelSection(**settings), CPU) == dtype


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_the_dtype_on_a_gpu_follows_what_it_can(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert compute_dtype(ModelSection(), torch.device("cuda")) == dtype
    assert compute_dtype(ModelSection(bf16=False), torch.device("cuda")) == torch.float32


def test_a_cpu_that_is_slow_in_bfloat16_is_named_in_one_line(caplog):
    _warned.clear()
    slow = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert compute_dtype(ModelSection(bf16=True), CPU) == torch.bfloat16
        if slow:  # as torch does, with a trace of 20 lines
            warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:...", stacklevel=1)
    assert [str(one.message) for one in seen] == []
    assert caplog.text.count("warning: bf16: this CPU has no instructions for bfloat16") == slow


@pytest.mark.parametrize("slow", [True, False])
def test_a_model_that_a_script_loaded_in_bfloat16_is_slow_there_too(caplog, monkeypatch, slow):
    _warned.clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: not slow)
    for name in (torch.bfloat16, torch.float16, torch.float32):
        half = name != torch.float32
        assert dtype_of_weights(nn.Linear(2, 2, dtype=name), torch.float32, CPU) == (name if half else torch.float32)
    assert caplog.text.count("a model loaded with dtype=torch.float32") == slow


def test_a_folder_loads_in_the_dtype_asked_for(folder):
    model = load_model(ModelSection(base_model=folder), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.lm_head.weight, tiny("llama").lm_head.weight.to(torch.bfloat16))


@pytest.mark.parametrize(("head", "labels"), [("sequence_score", 1), ("step_score", 2)])
def test_a_fresh_score_head_depends_on_the_seed_alone(folder, head, labels):
    section = ModelSection(base_model=folder)
    heads = []
    for seed in (1, 1, 2):
        torch.rand(len(heads) + 1)
        model = load_model(section, torch.float32, head=head, tokenizer=tokenizer(), seed=seed)
        heads.append(model.score.weight)
        assert model.config.pad_token_id == 3
    assert heads[0].shape[0] == labels
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert load_model(ModelSection(base_model=folder, num_labels=3), torch.float32, head=head).score.out_features == 3


def test_embeddings_grow_with_the_tokenizer_and_never_shrink(folder):
    section = ModelSection(base_model=folder)
    assert load_model(section, torch.float32, tokenizer=tokenizer(50)).lm_head.out_features == VOCABULARY
    grown = load_model(section, torch.float32, tokenizer=tokenizer(VOCABULARY + 2))
    assert grown.lm_head.out_features == grown.config.vocab_size == VOCABULARY + 2
    rounded = ModelSection(base_model=folder, resize_to_32=True, mean_resizing=True)
    assert load_model(rounded, torch.float32, tokenizer=tokenizer(VOCABULARY + 2)).lm_head.out_features == 96


def test_a_new_padding_token_gets_a_row_and_is_named(folder, caplog):
    caplog.set_level("INFO")
    grown = tokenizer()
    grown.add_special_tokens({"pad_token": "<pad>"})
    for _ in range(2):
        model = load_model(ModelSection(base_model=folder), torch.float32, tokenizer=grown)
    assert model.config.pad_token_id == grown.pad_token_id == VOCABULARY
    assert caplog.text.count("for the token that the model does not know: '<pad>'") == 1
    assert model(input_ids=torch.tensor([[VOCABULARY]])).logits.shape[-1] == VOCABULARY + 1


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("flash_attention_2", {"attention": "flash_attention_2"}),
        ("flash_attention_2", {"load_options": {"attn_implementation": "flash_attention_2"}}),
        ("kernels-community/flash-attn2", {"load_options": {"attn_implementation": "kernels-community/flash-attn2"}}),
    ],
)
def test_a_flash_attention_that_is_not_installed_is_done_without(name, keys, folder, caplog, monkeypatch):
    monkeypatch.setattr("upweight.log._warned", set())
    monkeypatch.setattr("upweight.models.load.is_kernels_available", lambda: False)
    monkeypatch.setitem(load.FLASH, "flash_attention_2", lambda: False)
    model = load_model(ModelSection(base_model=folder, **keys), torch.float32)
    assert model.config._attn_implementation == "sdpa"
    assert f"{name} is not installed; packed rows have attention kernels of their own" in caplog.text


def test_masters_begin_with_what_the_files_hold(folder, tmp_path_factory):
    section = ModelSection(base_model=folder)
    model = load_model(section, master_dtype(section, torch.bfloat16))
    set_up_precision(model, torch.bfloat16)
    right = dict(load_model(section, torch.float32).named_parameters())
    assert all(torch.equal(weight, right[name]) for name, weight in model.named_parameters())
    assert model(input_ids=torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
    half = str(tmp_path_factory.mktemp("half"))
    load_model(section, torch.bfloat16).save_pretrained(half)
    assert master_dtype(ModelSection(base_model=half), torch.bfloat16) == torch.bfloat16


def test_config_overrides_hold_and_unknown_ones_are_errors(folder):
    section = ModelSection(base_model=folder, config_overrides={"rms_norm_eps": 0.5})
    assert load_model(section, torch.float32).model.norm.variance_epsilon == 0.5
    with pytest.raises(UserError, match=r"model_config: 'rms_norm_esp'.*mean 'rms_norm_eps'"):
        load_model_config(ModelSection(base_model=folder, config_overrides={"rms_norm_esp": 0.5}))


def test_the_config_may_come_from_elsewhere(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("config")
    LlamaConfig.from_pretrained(folder, rms_norm_eps=0.25).save_pretrained(other)
    assert load_model_config(ModelSection(base_model=folder, config_source=str(other))).rms_norm_eps == 0.25


def test_further_options_reach_from_pretrained(folder):
    model = load_model(ModelSection(base_model=folder, attention="eager"), torch.float32)
    assert model.config._attn_implementation == "eager"


def test_a_folder_with_a_gguf_file_alone_names_it(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"holds a GGUF file: name it, `base_model: .*tiny.gguf`"):
        load_model_config(ModelSection(base_model=str(tmp_path)))


def test_a_named_class_must_exist(folder):
    model = load_model(ModelSection(base_model=folder, model_class="LlamaForCausalLM"), torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(UserError, match="model_type: transformers has no class"):
        load_model(ModelSection(base_model=folder, model_class="AutoModelForNothing"), torch.float32)


def test_a_named_class_must_be_that_of_the_model(folder):
    with pytest.raises(UserError, match=r"model_type: Qwen2ForCausalLM does not load .* a llama model. Leave the"):
        load_model(ModelSection(base_model=folder, model_class="Qwen2ForCausalLM"), torch.float32)


def test_vision_models_of_other_kinds_are_refused(tmp_path):
    AutoConfig.for_model("paligemma").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"base_model: .*\(paligemma\) reads images, .* one of these types: llava"):
        load_model(ModelSection(base_model=str(tmp_path)), torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "base_model: no model is named"),
        ({"base_model": "./nowhere"}, r"base_model: \./nowhere is no folder here .*\. Correct the path"),
        ({"base_model": "acme/no-such-model"}, "base_model: .*'acme/no-such-model': it is not on this machine, and"),
        ({"base_model": "nothing"}, r"not on this machine \(a relative path is looked up in /.*\), and the hub"),
    ],
)
def test_a_model_that_is_not_there_is_an_error_with_the_place_and_the_remedy(settings, message):
    with pytest.raises(UserError, match=message):
        load_model(ModelSection(**settings), torch.float32)


def test_a_path_with_one_slash_whose_folder_is_here_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo").mkdir()
    with pytest.raises(UserError, match=r"'grpo/tinny': .* \(a relative path is looked up in /"):
        load_model(ModelSection(base_model="grpo/tinny"), torch.float32)


def test_the_folder_of_an_adapter_is_named_with_its_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(UserError, match=r"base_model: .*holds an adapter of some/base: .*lora_model_dir; .*PeftModel"):
        load_model(ModelSection(base_model=str(tmp_path)), torch.float32)


def test_an_empty_folder_and_missing_weights_are_told_apart(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match="could not load the config of"):
        load_model(ModelSection(base_model=str(empty)), torch.float32)
    shutil.copy(f"{folder}/config.json", empty)
    with pytest.raises(UserError, match="could not load the weights of"):
        load_model(ModelSection(base_model=str(empty)), torch.float32)


def test_weights_that_would_be_random_are_refused(tmp_path):
    tiny("llama", auto=AutoModelForSequenceClassification).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lack weights.*lm_head\.weight.*CausalLM"):
        load_model(ModelSection(base_model=str(tmp_path)), torch.float32)


def test_layers_before_a_score_may_be_fresh_too(tmp_path):
    tiny("modernbert-decoder").save_pretrained(tmp_path)
    load_model(ModelSection(base_model=str(tmp_path)), torch.float32, head="sequence_score")


@pytest.mark.parametrize(
    ("head", "auto", "labels", "remedy"),
    [
        ("sequence_score", AutoModelForSequenceClassification, 2, "2 outputs, and 1 .*name one that has as many"),
        ("step_score", AutoModelForTokenClassification, 3, "3 outputs, and 2 .*num_labels: 3"),
    ],
)
def test_a_saved_head_with_other_outputs_is_refused(head, auto, labels, remedy, tmp_path):
    tiny("llama", auto=auto, num_labels=labels).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=remedy):
        load_model(ModelSection(base_model=str(tmp_path)), torch.float32, head=head)


def test_remote_code_is_not_run_unless_asked(folder):
    config = LlamaConfig.from_pretrained(folder).to_dict() | {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "code.Homemade"},
    }
    Path(folder, "config.json").write_text(json.dumps(config))
    Path(folder, "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="trust_remote_code: true"):
        load_model_config(ModelSection(base_model=folder))


def test_a_missing_gguf_file_is_an_error(folder):
    with pytest.raises(UserError, match=r"gguf_file: .*model.gguf does not exist"):
        load_model(ModelSection(base_model=folder, gguf_file="model.gguf"), torch.float32)


def test_quantised_weights_without_what_they_need_are_an_error(folder):
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("this machine can quantise")
    with pytest.raises(UserError, match="load_in_4bit"):
        load_model(
            ModelSection(base_model=folder), torch.bfloat16, adapter=AdapterSection(kind="qlora", load_in_4bit=True)
        )


@pytest.mark.slow  # transformers compiles the rounding
def test_ternary_weights_are_rounded_in_forwards_and_trained_as_they_are(folder, tmp_path):
    with torch.compiler.set_stance("force_eager"):  # transformers compiles the rounding
        section = ModelSection(base_model=folder, ternary=True)
        model = load_model(section, torch.float32)
        layer = model.get_submodule("model.layers.0.mlp.up_proj")
        x = torch.randn(3, layer.in_features)
        scale = layer.weight.abs().mean()
        rounded = (layer.weight / scale).round().clamp(-1, 1) * scale
        grid = x.abs().amax(-1, keepdim=True) / 127
        torch.testing.assert_close(layer(x), (x / grid).round() * grid @ rounded.T)
        layer(x).sum().backward()
        assert layer.weight.grad.abs().sum() > 0
        assert type(model.lm_head) is nn.Linear
        model.save_pretrained(tmp_path / "saved")
        again = load_model(ModelSection(base_model=str(tmp_path / "saved")), torch.float32)
        ids = torch.arange(8)[None]
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_ternary_training_does_not_begin_from_packed_weights(folder):
    config = Path(folder, "config.json")
    packed = {"quant_method": "bitnet", "linear_class": "bitlinear"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": packed}))
    with pytest.raises(UserError, match=r"use_onebitllms: weights of .* are stored quantised"):
        load_model(ModelSection(base_model=folder, ternary=True), torch.float32)


def test_dropout_is_off_everywhere():
    ids = torch.arange(12).view(1, -1)
    for kind, settings in (("llama", {"attention_dropout": 0.5}), ("phi", {"resid_pdrop": 0.5, "embd_pdrop": 0.5})):
        model = tiny(kind, **settings).train()
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        disable_dropout(model)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    layer = nn.Dropout(0.3)
    disable_dropout(layer)
    assert layer.p == 0


def test_a_missing_gguf_package_is_one_message(tmp_path, monkeypatch, caplog):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(load_gguf_checkpoint.__globals__, "is_gguf_available", lambda *_: False)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    reads = "reading GGUF files needs the package gguf: pip install gguf"
    with pytest.raises(UserError, match=reads), load_failures("base_model", str(tmp_path), "model"):
        load_gguf_checkpoint(str(tmp_path / "tiny.gguf"))
    assert "Loading a GGUF checkpoint" not in caplog.text


def test_the_limit_of_the_hub_is_named_only_where_the_hub_is_asked(tmp_path):
    with load_failures("base_model", str(tmp_path), "weights"):
        assert _activities == [f"loading the weights of {tmp_path}"]
    with load_failures("base_model", "nobody/nothing", "weights"):
        assert _activities == ["loading the weights of nobody/nothing (hub_timeout)"]


def test_a_gguf_file_is_unpacked_into_plain_weights(tmp_path):
    pytest.importorskip("gguf")
    source = tiny("llama", tie_word_embeddings=False)
    weights = source.state_dict()
    write_gguf(source, tmp_path / "tiny.gguf")
    for section in (
        ModelSection(base_model=str(tmp_path), gguf_file="tiny.gguf"),
        ModelSection(base_model=str(tmp_path / "tiny.gguf")),
    ):
        model = load_model(section, torch.float32)
        assert type(model).__name__ == "LlamaForCausalLM"
        for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
            assert torch.equal(model.state_dict()[name], weights[name])
        model.to(torch.bfloat16)


def test_arguments_of_loading_may_be_fields_of_the_config(folder):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = load_model(ModelSection(base_model=folder, load_options={"rope_scaling": scaling}), torch.float32)
    assert model.config.rope_parameters["factor"] == 2.0


class Runs:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_or_a_damaged_file_is_refused_and_nothing_of_it_runs(file, tmp_path):
    folder, ran = write_model(tmp_path / "model"), tmp_path / "ran"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    if file.endswith(".bin"):
        torch.save({"model.embed_tokens.weight": Runs(ran)}, folder / file)
    else:
        (folder / file).write_bytes(bytes(len(weights)))
    with pytest.raises(UserError, match=r"base_model: could not load the .*model'?: "):
        load_model(ModelSection(base_model=str(folder)), torch.float32)
    assert not ran.exists()


def test_a_shape_without_the_head_that_is_trained_is_said_as_of_weights(tmp_path):
    tiny("gemma3_text").config.save_pretrained(tmp_path)
    section = ModelSection(base_model=str(tmp_path))
    with pytest.raises(UserError, match=r"^base_model: could not load the shape of .* name a decoder"):
        model_without_weights(section, "step_score", config_with_head(section, "step_score"))


def test_a_type_that_transformers_does_not_know_is_said(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "frobnicate"}')
    with pytest.raises(UserError, match=r"transformers [\d.]+\S* does not know its type; a later version may"):
        load_model_config(ModelSection(base_model=str(tmp_path)))


def test_weights_that_are_cut_short_are_named(tmp_path):
    folder = write_model(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    said = (
        f"model.safetensors in it is cut short: {len(whole) // 2:,} of {len(whole):,} bytes are there. Copy or download"
    )
    with pytest.raises(UserError, match=re.escape(said)):
        load_model(ModelSection(base_model=str(folder)), torch.float32)


def test_options_of_bitsandbytes_are_those_that_transformers_reads():
    assert set(BITSANDBYTES) <= set(inspect.signature(BitsAndBytesConfig.__init__).parameters)
