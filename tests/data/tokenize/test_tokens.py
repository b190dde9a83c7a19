"""Cutting texts at special tokens never changes their tokens."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from made_tokenizers import MARKS, byte_tokenizer
from upweight.data.tokenize.tokens import TextTokens

TOKENIZERS = {family: byte_tokenizer(family) for family in MARKS}


def whole(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@given(st.data(), st.sampled_from(sorted(MARKS)))
def test_joined_pieces_are_the_whole(data, family):
    parts = st.sampled_from([*MARKS[family], "user\n", " ", "<", "|>", "the fox", "é😀", "<|im_", "\n\n"]) | st.text()
    texts = data.draw(st.lists(st.lists(parts, max_size=6).map("".join), min_size=1, max_size=5))
    tokenizer = TOKENIZERS[family]
    assert TextTokens(tokenizer, ()).ids(texts) == whole(tokenizer, texts)


def test_shared_pieces_are_tokenised_once():
    seen = []

    class Counting(TextTokens):
        def _encode_whole(self, texts):
            seen.append(list(texts))
            return super()._encode_whole(texts)

    tokenizer = TOKENIZERS["chatml"]
    prompt = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    texts = [prompt, f"{prompt}because", f"{prompt}why not"]
    assert Counting(tokenizer, ()).ids(texts) == whole(tokenizer, texts)
    assert sum(text.startswith("<|im_start|>user") and "assistant" not in text for text in seen[0]) == 1


def test_no_texts():
    assert TextTokens(TOKENIZERS["chatml"], ()).ids([]) == []


def words(special: list[AddedToken]) -> PreTrainedTokenizerFast:
    """A tokenizer of words whose beginning of a text is marked, as sentencepiece does it."""
    vocabulary = {word: number for number, word in enumerate(["?", "▁a", "a", "▁b", "b", "▁"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


def test_marked_beginnings_stay_where_they_were():
    tokenizer = words([AddedToken("<t>", normalized=False, special=True)])
    texts = ["a b<t>a b", "<t>a<t>b", "a", " b<t> a", "<t>"]
    assert TextTokens(tokenizer, ()).ids(texts) == whole(tokenizer, texts)


def test_tokens_that_swallow_spaces_or_overlap_are_no_cuts():
    special = [
        AddedToken("<l>", lstrip=True, normalized=False, special=True),
        AddedToken("<x>", normalized=False, special=True),
        AddedToken("a<x>", normalized=False, special=True),
    ]
    tokenizer = words(special)
    texts = ["a <l>b", "a<x>b", "b<x> a<x>"]
    assert TextTokens(tokenizer, ()).ids(texts) == whole(tokenizer, texts)
