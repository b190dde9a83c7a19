from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from made_tokenizers import byte_tokenizer, spaced_tokenizer
from upweight.errors import UserError
from upweight.train.distill.align import Aligner, readable
from upweight.train.distill.token_bytes import TokenBytes
from upweight.types import Sample

OTHER = ["they say that a fox and the dogs answered: maths is 2 + 3, say Größe 你好 🙂 again and again, user"] * 4
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("s", "a"), ("sa", "y"), ("▁", "say"), ("o", "x"), ("▁", "▁")]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def aligner_of(student, teacher):
    return Aligner(TokenBytes(student, "student"), TokenBytes(teacher, "teacher"))


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "chatml": byte_tokenizer("chatml", CHATML), "llama3": byte_tokenizer("llama3", corpus=OTHER),
        "spaced": spaced_tokenizer(MERGES),
    }  # fmt: skip


PAIRS = [("chatml", "llama3"), ("llama3", "chatml"), ("chatml", "spaced"), ("spaced", "llama3"), ("llama3", "spaced")]


@pytest.fixture(scope="module")
def aligners(tokenizers):
    return {(one, other): aligner_of(tokenizers[one], tokenizers[other]) for one, other in PAIRS}


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def made_sample(tokenizer, prompt, completion, *ends):
    prompt = encoded(tokenizer, prompt)
    ids = np.array([*prompt, *encoded(tokenizer, completion), *ends])
    return Sample(ids, np.arange(len(ids)) >= len(prompt))


def test_positions_are_those_where_both_tokenizers_end_a_token_at_the_same_character(tokenizers, aligners):
    student, teacher = tokenizers["chatml"], tokenizers["llama3"]
    prompt, completion = "The quick dog. ", "they say that the brown fox jumps again"
    sample = made_sample(student, prompt, completion)
    done = aligners["chatml", "llama3"].aligned(sample, keep=True)
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    ours, theirs = (one(completion, **options)["offset_mapping"] for one in (student, teacher))
    begins = {start: number for number, (start, _) in enumerate(theirs)}
    right = [start in begins for start, _ in ours]
    assert done.taught.tolist() == right
    assert 0.3 < np.mean(right) < 1
    before = [teacher.bos_token_id, *encoded(teacher, prompt)]
    assert done.teacher_text.ids.tolist() == [*before, *encoded(teacher, completion)]
    assert done.teacher_text.at.tolist() == [len(before) + begins[start] for start, _ in ours if start in begins]
    assert done.teacher_text.unread == 0
    stripped = aligners["chatml", "llama3"].aligned(sample, keep=False)
    assert stripped.loss_mask[sample.loss_mask].tolist() == right
    assert not stripped.loss_mask[~sample.loss_mask].any()


TEXTS = st.text(st.sampled_from("the say foxqu.:, 2+3Größe你好🙂\n"), max_size=30)


@settings(max_examples=30, deadline=None)
@given(texts=st.tuples(TEXTS, TEXTS), cut=st.integers(0, 3), pair=st.sampled_from(PAIRS))
def test_any_text_has_the_same_bytes_on_both_sides_of_every_span(aligners, tokenizers, texts, cut, pair):
    (prompt, completion), aligner, student = texts, aligners[pair], tokenizers[pair[0]]
    ids = np.array([*encoded(student, prompt), *encoded(student, completion)])
    ids = ids[: len(ids) - cut]  # which may end within a character
    sample = Sample(ids, np.arange(len(ids)) >= len(encoded(student, prompt)))
    found, spans = aligner.alignment(sample)
    teacher_bytes = lambda ids: b"".join(aligner.teacher.bytes_of.get(int(one), b"") for one in ids)  # noqa: E731
    ours, theirs = spans.student_2M.T.tolist(), spans.teacher_2M.T.tolist()
    for (start, end), (first, after), same in zip(ours, theirs, spans.same_M, strict=True):
        assert start < end
        if same and start:
            assert aligner.student.text(ids[start:end]) == teacher_bytes(found[first:after])
        for k, mask in enumerate(sample.loss_mask[start:end]):
            assert mask == sample.loss_mask[start], k
    assert all(before[1] <= after[0] for before, after in pairwise(ours))
    whole = aligner.student.text(ids)
    whole = whole[1:] if aligner.student.prefixes and whole.startswith(b" ") else whole
    read = teacher_bytes(found)
    read = read[1:] if aligner.teacher.prefixes and read.startswith(b" ") else read
    assert read.decode() == whole.decode(errors="replace")


def test_ends_of_turns_are_one_outcome_and_other_marks_are_read_as_text(tokenizers, aligners):
    aligner, student, teacher = aligners["chatml", "llama3"], tokenizers["chatml"], tokenizers["llama3"]
    end, other_end = student.eos_token_id, teacher.eos_token_id
    assert aligner.pairs[end] == other_end
    sample = made_sample(student, "<|im_start|>user\nsay fox<|im_end|>\n<|im_start|>assistant\n", "fox", end)
    text = aligner.aligned(sample, keep=False).teacher_text
    assert teacher.decode(text.ids) == (
        "<|begin_of_text|><|im_start|>user\nsay fox<|eot_id|>\n<|im_start|>assistant\nfox<|eot_id|>"
    )
    assert text.ids[text.at[-1]] == other_end  # the end is predicted behind the same text
    own, theirs = aligner.shared
    assert theirs[own.tolist().index(end)] == other_end
    back = aligners["llama3", "chatml"]
    begun = made_sample(teacher, "<|begin_of_text|>say", " fox", other_end)
    assert student.decode(back.aligned(begun, keep=False).teacher_text.ids) == "say fox<|im_end|>"


def test_marks_that_a_text_names_are_text(tokenizers, aligners):
    student, teacher = tokenizers["chatml"], tokenizers["llama3"]
    sample = made_sample(student, "what is ", "<|eot_id|> for?")
    ids = aligners["chatml", "llama3"].aligned(sample, keep=False).teacher_text.ids
    assert teacher.eos_token_id not in ids
    assert teacher.decode(ids[1:]) == "what is <|eot_id|> for?"


def test_every_shared_outcome_stands_for_the_same_bytes(aligners):
    for (one, other), aligner in aligners.items():
        own, theirs = aligner.shared
        assert len(set(own.tolist())) == len(own) == len(set(theirs.tolist())) > 30, (one, other)
        for a, b in zip(own.tolist(), theirs.tolist(), strict=True):
            assert aligner.student.bytes_of.get(a) == aligner.teacher.bytes_of.get(b)
    # a letter that has a token is that token, not the one for its byte
    spaced = aligners["chatml", "spaced"].teacher
    assert spaced.id_of[b"a"] not in spaced.fallback
    assert spaced.id_of[b"\n"] in spaced.fallback


def test_a_space_that_begins_texts_is_of_the_tokenizer_not_of_the_text(tokenizers, aligners):
    student, teacher = tokenizers["chatml"], tokenizers["spaced"]
    sample = made_sample(student, "the fox", "say the fox")
    found = aligners["chatml", "spaced"].aligned(sample, keep=True)
    assert teacher.convert_ids_to_tokens(found.teacher_text.ids) == [
        "<s>", "▁the", "▁", "f", "ox", "say", "▁the", "▁", "f", "ox",
    ]  # fmt: skip
    assert found.taught[0]
    back = made_sample(teacher, "the fox", "")
    text = aligners["spaced", "llama3"].alignment(back).ids
    assert tokenizers["llama3"].decode(text) == "<|begin_of_text|>the fox"


def test_bytes_that_are_no_text_are_left_out_and_counted(tokenizers, aligners):
    student, teacher = tokenizers["chatml"], tokenizers["llama3"]
    smile = encoded(student, "🙂")
    assert len(smile) == 4
    prompt = encoded(student, "say ")
    ids = np.array([*prompt, *encoded(student, "fox"), *smile[:2], *encoded(student, " fox")])
    sample = Sample(ids, np.arange(len(ids)) >= len(prompt))
    done = aligners["chatml", "llama3"].aligned(sample, keep=True)
    assert teacher.decode(done.teacher_text.ids[1:]) == "say fox\N{REPLACEMENT CHARACTER} fox"
    assert done.teacher_text.unread == 2
    at = len(encoded(student, "fox"))
    assert done.taught[at]  # what follows the text before them
    assert not done.taught[at + 1]
    whole = Sample(np.array([*prompt, *smile]), np.arange(len(prompt) + 4) >= len(prompt))
    assert aligners["chatml", "spaced"].aligned(whole, keep=True).taught.all()  # bytes of both begin together
    text, place, broken = readable(b"a\xf0\x9fb\xff")
    assert text == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    assert place.tolist() == [0, 1, -1, -1, 3, 4, -1, -1, 5]
    assert broken.tolist() == [False, True, True, False, True]


def test_a_teacher_that_changes_what_it_reads_is_compared_before_it_only(tokenizers):
    changed = byte_tokenizer("plain")
    changed.backend_tokenizer.normalizer = normalizers.Lowercase()
    done = aligner_of(tokenizers["chatml"], changed).aligned(
        made_sample(tokenizers["chatml"], "say ", "The Fox", tokenizers["chatml"].eos_token_id), keep=True
    )
    assert done.taught.tolist() == [True, *[False] * (len(done.taught) - 2), True]
    assert done.teacher_text.unread == len(done.taught) - 1


def test_tokenizers_whose_bytes_are_not_known_are_refused(tokenizers):
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"distill\.align: there has a tokenizer that is neither byte-level"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), "there")
    with pytest.raises(UserError, match=r"distill\.align: there has a tokenizer without a tokenizer\.json"):
        TokenBytes(object(), "there")
