import base64
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from upweight.config.sections.model import ModelSection, SpecialTokens
from upweight.errors import UserError
from upweight.log import _warned
from upweight.models.tokenizer import choose_padding, load_tokenizer


@pytest.fixture(autouse=True)
def _nothing_said_yet():
    _warned.clear()


def words(*extra: str, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *extra, "a", "b", "c"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", **special)


@pytest.fixture
def folder(tmp_path):
    words("<pad>", eos_token="</s>").save_pretrained(tmp_path)
    return str(tmp_path)


def test_tokens_are_set_and_added(folder):
    tokenizer = load_tokenizer(
        ModelSection(
            base_model=folder,
            special_tokens=SpecialTokens(bos_token="<s>", pad_token="<mine>", additional_special_tokens=["<tool>"]),
            new_tokens=["newword"],
        )
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<mine>")
    assert tokenizer.tokenize("a newword <tool> b") == ["a", "newword", "<tool>", "b"]
    assert tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids("<tool>")].special
    assert len(tokenizer) == 10


def test_a_padding_token_that_is_set_is_kept():
    tokenizer = words("<pad>", eos_token="</s>", pad_token="c")
    choose_padding(tokenizer)
    assert tokenizer.pad_token == "c"


@pytest.mark.parametrize("set_to_end", [False, True])
def test_a_reserved_padding_token_goes_before_the_end_token(set_to_end, caplog):
    caplog.set_level("INFO")
    tokenizer = words("<pad>", eos_token="</s>", **({"pad_token": "</s>"} if set_to_end else {}))
    choose_padding(tokenizer)
    assert tokenizer.pad_token == "<pad>"
    assert "'<pad>'" in caplog.text


def test_the_end_token_pads_only_for_want_of_another_and_it_is_said(caplog):
    caplog.set_level("INFO")
    tokenizer = words(eos_token="</s>")
    choose_padding(tokenizer)
    assert tokenizer.pad_token == "</s>"
    assert "end token '</s>'" in caplog.text


def test_the_end_token_pads_when_the_user_says_so(folder):
    section = ModelSection(base_model=folder, special_tokens=SpecialTokens(pad_token="</s>"))
    assert load_tokenizer(section).pad_token == "</s>"


def test_without_end_and_padding_token_the_remedy_is_named():
    with pytest.raises(UserError, match="special_tokens: "):
        choose_padding(words())


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match="base_model: could not load the tokenizer of"):
        load_tokenizer(ModelSection(base_model=str(tmp_path)))
    Qwen2Config(hidden_size=8, num_attention_heads=2).save_pretrained(tmp_path)  # of which transformers makes one
    with pytest.raises(UserError, match=r"no tokenizer files \(tokenizer.json\). Copy the tokenizer's files into it"):
        load_tokenizer(ModelSection(base_model=str(tmp_path)))


def test_a_folder_with_a_gguf_file_alone_names_it(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"the folder holds a GGUF file: name it, `base_model: .*/tiny.gguf`\.$"):
        load_tokenizer(ModelSection(base_model=str(tmp_path)))


def test_an_unknown_tokenizer_class_is_an_error(folder):
    with pytest.raises(UserError, match="tokenizer_type"):
        load_tokenizer(ModelSection(base_model=folder, tokenizer_class="NoSuchTokenizer"))


@pytest.mark.parametrize(("key", "section"), [("base_model", {}), ("tokenizer_config", {"tokenizer": "./nowhere"})])
def test_a_path_that_is_not_there_is_named_by_its_own_key(key, section):
    with pytest.raises(UserError, match=rf"^{key}: \./nowhere is no folder here"):
        load_tokenizer(ModelSection(**{"base_model": "./nowhere", **section}))


@pytest.mark.parametrize("version", [3, 7, 13])
def test_mistrals_file_is_read_with_its_tokens(version, tmp_path):
    pytest.importorskip("mistral_common")
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": None}
        for rank in range(256)
    ]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    sizes = {"num_vocab_tokens": 256, "default_vocab_size": 276, "default_num_special_tokens": 20}
    tekken = {"config": {"pattern": pattern, **sizes, "version": f"v{version}"}, "vocab": vocabulary}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tokenizer = load_tokenizer(ModelSection(base_model=str(tmp_path), mistral_tokens=True))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert tokenizer.tekken_version == version
    assert tokenizer("a")["input_ids"] == [1, 20 + ord("a")]
    assert tokenizer("<s>[INST]a[/INST]b</s>", add_special_tokens=False)["input_ids"] == [1, 3, 117, 4, 118, 2]


def test_mistrals_tokens_are_asked_of_a_tokenizer_that_has_them(folder):
    with pytest.raises(UserError, match=r"tokenizer_use_mistral_common: the tokenizer has no \[INST\]"):
        load_tokenizer(ModelSection(base_model=folder, mistral_tokens=True))


def test_the_choice_of_a_padding_token_is_said_once(folder, caplog):
    caplog.set_level("INFO")
    for _ in range(3):  # as a run loads it for data, for rewards and for the model
        load_tokenizer(ModelSection(base_model=folder))
    assert caplog.text.count("padding token") == 1
