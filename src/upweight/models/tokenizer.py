"""Load a tokenizer, set and add its tokens, and choose its padding token."""

import json
import re
from pathlib import Path
from typing import Any

import transformers
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.log import inform_once
from upweight.models.first_look import TOKENIZER_REMEDY, lacks_tokenizer, packed_remedy
from upweight.models.load import load_failures, resolve_source
from upweight.models.processor import with_processor

# Tokens that model families reserve for padding although their tokenizers do not declare it.
PADDING = ("<pad>", "[PAD]", "<|pad|>", "<|PAD|>", "<|padding|>", "<PAD>", "<|finetune_right_pad_id|>", "<|endoftext|>")

MISTRAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the tokens that the settings set and add, and a padding token."""
    packed = section.gguf_file if section.tokenizer is None else None  # the file is in `base_model`
    key = "tokenizer_config" if section.tokenizer else "base_model"
    source, gguf_file = resolve_source(section.tokenizer or section.base_model, packed, key)
    options: dict[str, Any] = {"use_fast": section.tokenizer_use_fast, "trust_remote_code": section.trust_remote_code}
    revision = section.revision if section.tokenizer is None else None
    further = {"legacy": section.tokenizer_legacy, "gguf_file": gguf_file, "revision": revision}
    options |= {name: value for name, value in further.items() if value is not None}
    chosen = getattr(transformers, section.tokenizer_class, None) if section.tokenizer_class else AutoTokenizer
    if chosen is None:
        raise UserError(f"tokenizer_type: transformers has no class {section.tokenizer_class!r}")
    if chosen is AutoTokenizer:
        # Else mistral-common's class is loaded where it is installed, which adds no tokens and reads no marks in texts.
        options["mistral_format"] = False
        options |= {"fix_mistral_regex": True} if section.mistral_tokens else {}
    if chosen is AutoTokenizer and gguf_file is None and lacks_tokenizer(source):
        reason = packed_remedy(Path(source), key) or f"has no tokenizer files (tokenizer.json). {TOKENIZER_REMEDY}"
        raise UserError(f"{key}: could not load the tokenizer of {source!r}: the folder {reason}.")
    with load_failures(key, source, "tokenizer"):
        tokenizer = chosen.from_pretrained(source, **options)
    if section.mistral_tokens:
        _set_mistral_tokens(tokenizer)
        tokenizer.tekken_version = _tekken_version(source, revision)  # its file has no chat template
    special = {name: value for name, value in section.special_tokens.model_dump().items() if value is not None}
    additional = special.pop("additional_special_tokens", [])
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(additional, special_tokens=True)
    tokenizer.add_tokens(section.new_tokens)
    if section.special_tokens.pad_token is None:
        choose_padding(tokenizer)
    return with_processor(tokenizer, section)


def _set_mistral_tokens(tokenizer: Any) -> None:
    """Name the special tokens of a tokenizer read from `tekken.json`, and let it begin texts with BOS."""
    known = tokenizer.get_vocab()
    if not {*MISTRAL_TOKENS.values(), "[INST]"} <= known.keys():
        problem = "the tokenizer has no [INST] token, or none of <s>, </s>, <pad> and <unk>"
        raise UserError(f"tokenizer_use_mistral_common: {problem}. Leave it out, or name a model with a tekken.json.")
    tokenizer.add_special_tokens(MISTRAL_TOKENS)
    bos = MISTRAL_TOKENS["bos_token"]
    begins = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, known[bos])])
    tokenizer.backend_tokenizer.post_processor = begins


def _tekken_version(source: str, revision: str | None) -> int:
    """Return the version in a model's `tekken.json`, such as 7 of "v7"; 0 where it has none."""
    file = cached_file(source, "tekken.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return 0
    version = str(json.loads(Path(file).read_text(encoding="utf-8"))["config"].get("version") or "")
    return int(number[0]) if (number := re.search(r"\d+", version)) else 0


def take_chat_template(tokenizer: PreTrainedTokenizerBase, source: str, *, trust_remote_code: bool = False) -> None:
    """Set the chat template of a file, or of another tokenizer with its end token and its added tokens."""
    file = Path(source).expanduser()
    if file.is_file():
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        return
    source, _ = resolve_source(source, None, "chat_template_path")
    with load_failures("chat_template_path", source, "tokenizer"):
        template_source = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if not template_source.chat_template:
        raise UserError(f"chat_template_path: the tokenizer of {source!r} has no chat template. Name another.")
    tokenizer.chat_template = template_source.get_chat_template()
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(
        [token for token in template_source.added_tokens_decoder.values() if token.content not in known]
    )
    tokenizer.eos_token = template_source.eos_token


def choose_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set a padding token where it is missing or equals the end token while another one is reserved; log which."""
    if tokenizer.pad_token is not None and tokenizer.pad_token != tokenizer.eos_token:
        return
    vocabulary = tokenizer.get_vocab()
    reserved = next((name for name in PADDING if name in vocabulary and name != tokenizer.eos_token), None)
    if reserved is None and tokenizer.eos_token is None:
        raise UserError(
            "special_tokens: the tokenizer has neither a padding nor an end token; "
            "set them, for example `special_tokens: {eos_token: '</s>', pad_token: '<pad>'}`"
        )
    tokenizer.pad_token = reserved or tokenizer.eos_token
    token = repr(str(tokenizer.pad_token))
    why = f"the end token {token}, for want of another" if reserved is None else f"{token}, which the vocabulary has"
    inform_once(f"padding token: {why}; `special_tokens: {{pad_token: ...}}` changes it")


def eos_token_ids(base: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a completion: the tokenizer's end token and those of the model's generation config."""
    eos = getattr(getattr(base, "generation_config", None), "eos_token_id", None)
    tokens = [getattr(tokenizer, "eos_token_id", None), *(eos if isinstance(eos, list | tuple) else [eos])]
    return frozenset(int(token) for token in tokens if token is not None)
