"""Texts to imitate, and which of their tokens are trained on."""

import json

import pytest

from made_tokenizers import byte_tokenizer, encoder
from upweight.data.encode import RowError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def spans(entry, row, family="chatml", **keys):
    """The whole text of each record, and the stretches that are trained on."""
    tokenizer = byte_tokenizer(family)
    result = []
    for record in encoder(entry, tokenizer, **keys)(row):
        ids, scored = record.columns["input_ids"], record.columns["loss_mask"]
        stretches, current = [], []
        for token, counts in [*zip(ids, scored, strict=True), (None, False)]:
            if counts:
                current.append(token)
            elif current:
                stretches.append(tokenizer.decode(current))
                current = []
        result.append((tokenizer.decode(ids), stretches))
    return result


def chat(entry=None, messages=TALK, **keys):
    (found,) = spans({"type": "chat_template", **(entry or {})}, {"messages": messages}, chat_template="chatml", **keys)
    return found


def test_assistant_turns_are_trained_on():
    text, trained = chat()
    assert trained == ["two<|im_end|>", "four<|im_end|>"]
    assert text.endswith("<|im_start|>assistant\nfour<|im_end|>")


def test_a_conversation_may_be_json_text_as_in_a_csv():
    assert chat(messages=json.dumps(TALK)) == chat()
    for text in ("Customer: one\nAgent: two", "[]", '{"role": "user"}', "[{'role': 'user', 'content': 'one'}]"):
        with pytest.raises(RowError, match=r"expected a list of messages, or JSON text of one, got text"):
            chat(messages=text)


def test_words_of_the_answer_in_the_question_are_not_trained_on():
    talk = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "two"}]
    text, trained = chat(messages=talk)
    assert trained == ["two<|im_end|>"]
    assert text.count("two") == 2


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"roles_to_train": ["user"]}, ["one<|im_end|>", "three<|im_end|>"]),
        ({"train_on_eos": "none"}, ["two", "four"]),
        ({"train_on_eos": "last"}, ["two", "four<|im_end|>"]),
        ({"train_on_eos": "all"}, ["<|im_end|>", "<|im_end|>", "two<|im_end|>", "<|im_end|>", "four<|im_end|>"]),
        ({"drop_system_message": True}, ["two<|im_end|>", "four<|im_end|>"]),
    ],
)
def test_what_is_trained_on_can_be_chosen(entry, expected):
    text, trained = chat(entry)
    assert trained == expected
    assert ("Be brief." in text) != entry.get("drop_system_message", False)


def test_messages_say_themselves_whether_they_are_trained_on():
    marked = [{**message, "train": number in (1, 4)} for number, message in enumerate(TALK)]
    assert chat({"message_field_training": "train"}, marked)[1] == ["one<|im_end|>", "four<|im_end|>"]
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}, {"begin_offset": 2, "end_offset": 3, "train": True}]
    marked = [*TALK[:4], {**TALK[4], "parts": detail}]
    assert chat({"message_field_training_detail": "parts"}, marked)[1] == ["two<|im_end|>", "ur<|im_end|>"]


def test_characters_that_no_range_names_are_not_trained_on():
    keys = {"message_field_training_detail": "parts", "message_field_training": "train"}
    named = [{"begin_offset": 2, "end_offset": 3, "train": True}]
    assert chat(keys, [*TALK[:4], {**TALK[4], "parts": named}])[1] == ["two<|im_end|>", "ur<|im_end|>"]
    asked = [*TALK[:3], {**TALK[3], "content": "four", "parts": named}, {**TALK[4], "parts": []}]
    assert chat(keys, asked)[1] == ["two<|im_end|>", "ur<|im_end|>"]


def test_without_roles_only_messages_that_say_so_are_trained_on():
    marked = [*TALK[:4], {**TALK[4], "train": True}]
    entry = {"roles_to_train": [], "message_field_training": "train"}
    assert chat(entry, marked)[1] == ["four<|im_end|>"]
    with pytest.raises(RowError, match="'roles_to_train' is empty"):
        chat(entry)


def test_a_conversation_without_a_trained_turn_says_what_masks_it():
    masked = [{**message, "train": False} for message in TALK]
    with pytest.raises(RowError, match=r"\(assistant\), and 'train' is false where one could be; a 'filter' leaves"):
        chat({"message_field_training": "train"}, masked)
    with pytest.raises(RowError, match=r"at least one turn to train on \(assistant\); a 'filter' leaves rows out"):
        chat({}, TALK[:2])


def test_inputs_can_be_trained_on():
    text, trained = chat(train_on_inputs=True)
    assert "".join(trained) == text.removeprefix("<|im_start|>")


def test_conversations_written_for_sharegpt():
    talk = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    ((_, trained),) = spans({"type": "sharegpt"}, {"conversations": talk}, chat_template="chatml")
    assert trained == ["two<|im_end|>"]


def test_a_turn_that_later_ones_rewrite_gets_a_text_of_its_own():
    (first, trained), (last, trained_last) = spans({}, {"messages": TALK}, chat_template="qwen3")
    assert trained == ["<think>\n\n</think>\n\ntwo<|im_end|>"]
    assert trained_last == ["<think>\n\n</think>\n\nfour<|im_end|>"]
    assert "three" not in first
    assert "<|im_start|>assistant\ntwo<|im_end|>" in last


@pytest.mark.parametrize("extra", ["", "more"])
def test_alpaca(extra):
    ((text, trained),) = spans({"type": "alpaca"}, {"instruction": "do", "input": extra, "output": "done"}, "plain")
    assert trained == ["done</s>"]
    middle = "### Instruction:\ndo\n\n### Input:\nmore\n\n" if extra else "### Instruction:\ndo\n\n"
    assert text.endswith(f"\n\n{middle}### Response:\ndone</s>")


@pytest.mark.parametrize("extra", ["", "2 + 3"])
def test_alpaca_takes_the_system_text_of_a_row(extra):
    row = {"instruction": "Add.", "input": extra, "output": "5", "system": "Be brief."}
    ((text, _),) = spans({"type": "alpaca"}, row, "plain")
    assert text.startswith("<s>Be brief.\n\n### Instruction:\nAdd.")


def test_user_defined():
    entry = {"type": {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction}\nA: "}}
    assert spans(entry, {"q": "why", "a": "so"}, "plain") == [("<s>Q: why\nA: so</s>", ["so</s>"])]


@pytest.mark.parametrize(
    ("changed", "row", "text"),
    [
        ({"system_prompt": "Be kind."}, {}, "<<Be kind.>>Q: why"),
        ({"field_system": "sys"}, {"sys": "Be brief."}, "<<Be brief.>>Q: why"),
        ({"system_prompt": "Be kind.", "format": "Q: {instruction} {system}"}, {}, "Q: why <<Be kind.>>"),
        ({}, {}, "Q: why"),
    ],
)
def test_the_system_text_of_a_user_defined_format_goes_first_unless_the_format_places_it(changed, row, text):
    form = {"format": "Q: {instruction}", "system_format": "<<{system}>>", **changed}
    assert spans({"type": form}, {"instruction": "why", "output": "so", **row}, "plain") == [
        (f"<s>{text}so</s>", ["so</s>"])
    ]


@pytest.mark.parametrize("entry", [{"type": "completion"}, {}, {"type": "completion", "field": "body"}])
def test_raw_text(entry):
    row = {entry.get("field", "text"): "some words"}
    assert spans(entry, row, "plain") == [("<s>some words</s>", ["some words</s>"])]


def test_prompt_and_completion():
    assert spans({}, {"prompt": "a b", "completion": " c"}, "plain") == [("<s>a b c</s>", [" c</s>"])]
    ((_, trained),) = spans({}, {"prompt": TALK[:2], "completion": TALK[2:3]}, chat_template="chatml")
    assert trained == ["two<|im_end|>"]


def test_roles_are_chosen_in_prompts_and_completions_too():
    row = {"prompt": TALK[:2], "completion": TALK[2:]}
    assert spans({"roles_to_train": ["user"]}, row, chat_template="chatml")[0][1] == ["three<|im_end|>"]
    keys = {"chat_template": "chatml", "train_on_inputs": True}
    assert spans({"roles_to_train": ["user"]}, row, **keys)[0][1] == ["one<|im_end|>", "three<|im_end|>"]


def test_messages_of_another_column_without_a_type():
    assert spans({"field_messages": "talk"}, {"talk": TALK}, chat_template="chatml") == [chat()]


def test_token_ids_are_taken_as_they_are():
    (record,) = encoder({})({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]})
    assert record.columns == {"input_ids": [5, 6, 7], "loss_mask": [False, False, True]}


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"messages": TALK[:2]}, "messages"),
        ({"other": 1}, "messages"),
        ({"text": ""}, "text"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels"),
        ({"input_ids": [1, "x"]}, "input_ids"),
        ({"instruction": "x"}, "output"),
    ],
)
def test_bad_rows_name_their_key(row, key):
    with pytest.raises(RowError) as caught:
        encoder({}, chat_template="chatml")(row)
    assert caught.value.key == key
