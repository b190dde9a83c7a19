"""EBFT's rows: prompts with their true answer, or documents."""

import pytest

from made_tokenizers import byte_tokenizer, encoder
from upweight.data.encode import RowError
from upweight.errors import UserError


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


TALK = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]


def records(name, row, mode="structured", family="chatml"):
    tokenizer = byte_tokenizer(family)
    entry = {"type": name} if name else {}
    made = encoder(entry, tokenizer, rl="ebft", ebft={"mode": mode}, chat_template="chatml")(row)
    return tokenizer, made


def columns(name, row):
    _, made = records(name, row)
    return [{key: value for key, value in record.columns.items() if not key.endswith("_ids")} for record in made]


def truths(name, row, family="chatml"):
    """The true turns as text: the assistant's, and between them what others said."""
    tokenizer, made = records(name, row, family=family)
    return [[tokenizer.decode(ids) for ids in record.columns["truth_ids"]] for record in made]


def test_input_and_output():
    row = {"input": "a", "output": "b", "score": 1}
    assert columns("ebft_opencode.transform", row) == [{"prompt": [turn("user", "a")], "ground_truth": "b"}]


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_turns_of_a_conversation(key):
    first, last = {"prompt": TALK[:1], "ground_truth": "b"}, {"prompt": TALK[:3], "ground_truth": "d"}
    row = {key: TALK}
    assert columns("ebft_chat_multiturn.transform", row) == [{**first, "remaining_turns": TALK[2:]}]
    assert columns("ebft_chat_multiturn.transform_last_turn", row) == [last]
    assert columns("ebft_chat_multiturn.transform_all_turns", row) == [first, last]


@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("<reasoning>", "</reasoning>"),
                                   ("<|begin_of_thought|>", "<|end_of_thought|>")])  # fmt: skip
def test_reasoning(marks):
    row = {"messages": [turn("user", "a"), turn("assistant", f"{marks[0]}\nhm\n{marks[1]}\n\nb")]}
    assert columns("ebft_reasoning.transform", row)[0]["ground_truth"] == row["messages"][1]["content"]
    assert columns("ebft_reasoning.transform_answer_only", row)[0]["ground_truth"] == "b"
    (split,) = columns("ebft_reasoning.transform_split_thinking", row)
    assert split["ground_truth"] == "<think>\nhm\n</think>\n\nb"
    assert split["prompt"] == [turn("user", "a", reasoning_content="")]


def test_true_turns_are_what_the_template_would_have_the_model_write():
    first = ["b<|im_end|>"]
    assert truths("ebft_opencode.transform", {"input": "a", "output": "b"}) == [first]
    reply = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert truths("ebft_chat_multiturn.transform", {"messages": TALK}) == [[*first, reply, "d<|im_end|>"]]
    assert truths("ebft_chat_multiturn.transform", {"messages": TALK[:3]}) == [first]
    rows = {"prompt": TALK[:1], "completion": "b", "remaining_turns": TALK[2:]}
    assert truths(None, rows) == [[*first, reply, "d<|im_end|>"]]
    assert truths(None, {"prompt": "a", "completion": "b"}) == [first]


def trained(tokenizer, record):
    pairs = zip(record.columns["input_ids"], record.columns["loss_mask"], strict=True)
    return tokenizer.decode([token for token, scored in pairs if scored])


@pytest.mark.parametrize("row", [{"input": "ab c", "output": " d"}, {"question": "ab c", "answer": " d"}])
def test_documents_of_a_prompt_and_its_completion(row):
    tokenizer, (record,) = records("ebft_strided_structured.transform", row, "strided", "llama3")
    assert tokenizer.decode(record.columns["input_ids"]) == "<|begin_of_text|>ab c d"
    assert trained(tokenizer, record) == " d"
    assert record.columns["prompt_length"] == record.columns["loss_mask"].index(True)


def test_documents_of_a_conversation():
    tokenizer, (record,) = records("ebft_strided_chat.transform", {"messages": TALK}, "strided")
    assert trained(tokenizer, record) == "b<|im_end|>d<|im_end|>"
    tokenizer, (record,) = records("ebft_reasoning.transform_strided", {"messages": TALK}, "strided")
    assert trained(tokenizer, record) == "d<|im_end|>"


def test_rows_without_a_type():
    expected = {"prompt": "a", "ground_truth": "b", "level": 1}
    assert columns(None, {"prompt": "a", "ground_truth": "b", "level": 1}) == [expected]
    assert columns(None, {"prompt": "a", "completion": "b", "level": 1}) == [expected]
    assert columns(None, {"prompt": "a", "ground_truth": None, "answer": "b", "level": 1}) == [expected]
    tokenizer, (record,) = records(None, {"text": "some words"}, "strided", "llama3")
    assert trained(tokenizer, record) == "some words"
    tokenizer, (record,) = records(None, {"prompt": "some", "ground_truth": " words"}, "strided")
    assert trained(tokenizer, record) == " words"
    _, (record,) = records(None, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "strided")
    assert record.columns == {"input_ids": [5, 6, 7], "loss_mask": [False, True, True], "prompt_length": 1}


def test_documents_need_strided_mode():
    with pytest.raises(UserError, match="strided"):
        records("ebft_strided_structured.transform", {"input": "a", "output": "b"})


@pytest.mark.parametrize(
    "row", [{}, {"messages": []}, {"messages": TALK[:1]}, {"messages": [turn("user", "a"), turn("assistant", "")]}]
)
def test_bad_rows(row):
    with pytest.raises(RowError):
        records("ebft_chat_multiturn.transform", row)
