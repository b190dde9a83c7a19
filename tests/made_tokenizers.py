"""Tokenizers built in code: byte-level, with the marks of one model family as special tokens."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from upweight.config import parse_config
from upweight.config.config import Config
from upweight.config.view import view
from upweight.data.encode import Encoder, build_encoder

MARKS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "plain": ("<s>", "</s>"),
}
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "plain": "<s>"}
EOS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<eos>", "plain": "</s>"}
CORPUS = ["The quick brown fox jumps over the lazy dog. user assistant system ### Instruction: answer question"] * 3


def byte_tokenizer(
    family: str = "chatml", template: str | None = None, corpus: list[str] = CORPUS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the merges of a corpus; families with a BOS add it to what they encode."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|pad|>", *MARKS[family])])
    if family in BOS:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS[family]} $A", special_tokens=[(BOS[family], backend.token_to_id(BOS[family]))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS.get(family), eos_token=EOS[family], pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def spaced_tokenizer(merges: list[tuple[str, str]], template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer like SentencePiece's: spaces are letters, a text begins with one, and rare characters are bytes."""
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*first, "▁", *"abcdefghijklmnopqrstuvwxyz.,:!TA0123456789", *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def config(entry: dict[str, Any], **keys: Any) -> Config:
    """A config with one dataset; without `rl` it trains by imitation."""
    whole = {"base_model": "tiny", "datasets": [{"path": "rows.jsonl", **entry}], **keys}
    if whole.get("rl") in ("grpo", "gdpo"):
        whole = {"trl": {"reward_funcs": ["rewards.one"]}, **whole}
    return parse_config(whole, folder=Path())


def encoder(entry: dict[str, Any], tokenizer: Any = None, folder: Path | None = None, **keys: Any) -> Encoder:
    """The encoder for one dataset of a config."""
    made = config(entry, **keys)
    tokenizer = tokenizer or byte_tokenizer()
    return build_encoder(made.data, made.method, made.data.datasets[0], 0, tokenizer, view(made), folder or Path())


def text_of(entry: dict[str, Any], row: dict[str, Any], tokenizer: Any = None, **keys: Any) -> dict[str, Any]:
    """The text of the one record that a row becomes."""
    (record,) = encoder(entry, tokenizer, **keys)(row)
    return record.text
