"""Ids by word are those of whole texts; tokenizers for which they differ are left alone."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from made_tokenizers import CORPUS, byte_tokenizer
from upweight.data.tokenize import word_cache
from upweight.data.tokenize.tokens import TextTokens
from upweight.data.tokenize.word_cache import WordIds

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = [
    *"abzAZ07 '.!?/_-(<|>\n\t  ",
    "'s",
    "don't",
    "the",
    " quick",
    "\r\n",
    "é",
    "e\u0301",
    "漢字",
    "あ",
    "🙂",
    "\0",
]
ALPHABET += ["<|im_start|>", "<|im_end|>", "<|im_", "assistant", "  ", "\n\n", " \n", "²", "\u2019", "\u00a0"]


def made(pattern=None, *, normalizer=None, prefix_space=False, tokens=()):
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level]) if split else byte_level
    backend.decoder = decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    corpus = [*CORPUS, "it's 100 % don't\n\nnew lines.\n\n quick  brown 漢字 12345 \n " * 20]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


TAKEN = {
    "gpt2": made,
    "qwen": lambda: made(QWEN, normalizer=normalizers.NFC()),
    "o200k": lambda: made(O200K),
    "added": lambda: made(QWEN, tokens=[AddedToken("the qu", normalized=False), AddedToken("assis", normalized=False)]),
    "chatml": lambda: byte_tokenizer("chatml"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_ids_are_those_of_whole_texts(name, monkeypatch):
    monkeypatch.setattr(word_cache, "MOST_WORDS", 3000)  # it is emptied on the way
    tokenizer, rng = TAKEN[name](), random.Random(0)
    words = WordIds.of(tokenizer)
    assert words is not None
    for _ in range(12):
        texts = ["".join(rng.choices(ALPHABET, k=rng.randint(0, 40))) for _ in range(500)]
        assert words.ids(texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert len(words._words) <= 3000


@pytest.mark.parametrize(
    "text",
    [
        lambda number: f"row{number} " * 5,  # ever new words
        lambda number: "漢字" * 300 + str(number),  # a script without spaces
        lambda number: " ".join(f"🙂{number}é{part}" * 3 for part in range(8)),  # words of many tokens
    ],
)
def test_what_is_kept_is_bounded_whatever_the_words_are(text, monkeypatch):
    monkeypatch.setattr(word_cache, "MOST_WORDS", 500)
    monkeypatch.setattr(word_cache, "MOST_IDS", 2000)
    tokenizer = made()
    words = WordIds.of(tokenizer)
    assert words is not None
    for start in range(0, 2000, 100):
        texts = [text(number) for number in range(start, start + 100)]
        assert words.ids(texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]
        assert len(words._words) <= 500
        assert sum(map(len, words._words.values())) == words._size <= 2000
        assert all(len(word) <= word_cache.LONGEST_WORD for word in words._words)


REFUSED = {
    "a space before the first word": lambda: made(prefix_space=True),
    "a pattern with the space after the word": lambda: made(r"\S+ ?|\s+"),
    "a pattern that joins digits over spaces": lambda: made(r"\p{N}+(?: \p{N}+)*| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"),
    "a normalizer that changes spaces": lambda: made(normalizer=normalizers.Replace("  ", " ")),
    "a token that takes the spaces around it": lambda: made(tokens=[AddedToken("<mask>", lstrip=True)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tokenizers_are_left_alone(name):
    assert WordIds.of(REFUSED[name]()) is None


def test_tokenizers_without_a_pattern_of_words_are_left_alone():
    tokenizer = made()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert WordIds.of(tokenizer) is None
    assert WordIds.of(object()) is None


def test_a_tokenizer_that_says_otherwise_is_believed():
    class Lower(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            lower = [one.lower() for one in text] if isinstance(text, list) else text.lower()
            return super().__call__(lower, **options)

    tokenizer = Lower(tokenizer_object=made().backend_tokenizer, eos_token="<|im_end|>")
    tokens = TextTokens(tokenizer, [])
    texts = ["plain", "The Quick brown"]
    assert tokens.ids(texts) == tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokens._words is None


def test_truncation_that_others_turned_on_does_not_cut_words():
    tokenizer = made()
    words = WordIds.of(tokenizer)
    assert words is not None
    tokenizer.backend_tokenizer.enable_truncation(1)
    text = "The quickest foxes"
    assert words.ids([text]) == [tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert len(words.ids([text])[0]) > 3
