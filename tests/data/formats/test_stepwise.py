"""Answers in steps: the class of a step stands on the last token of its separator."""

import pytest

from made_tokenizers import byte_tokenizer, encoder
from upweight.data.encode import RowError

ROW = {"prompt": "9.8 or 9.11?", "completions": ["0.8 is larger.", "So 9.8."], "labels": [True, False]}


def prepared(row=ROW, family="chatml", **entry):
    tokenizer = byte_tokenizer(family)
    made = encoder({"type": "stepwise_supervised", **entry}, tokenizer, process_reward_model=True)
    (record,) = made(row)
    return tokenizer, record


def test_labels_stand_at_the_ends_of_steps():
    tokenizer, record = prepared()
    ids, labels = record.columns["input_ids"], record.columns["labels"]
    assert tokenizer.decode(ids) == "9.8 or 9.11?0.8 is larger.\nSo 9.8.\n"
    ends = [number for number, label in enumerate(labels) if label != -100]
    assert [labels[end] for end in ends] == [1, 0]
    assert [tokenizer.decode(ids[: end + 1]) for end in ends] == [
        "9.8 or 9.11?0.8 is larger.\n",
        "9.8 or 9.11?0.8 is larger.\nSo 9.8.\n",
    ]
    assert record.text == ROW


def test_a_bos_comes_first_where_there_is_one():
    tokenizer, record = prepared(family="llama3")
    assert record.columns["input_ids"].count(tokenizer.bos_token_id) == 1
    assert record.columns["input_ids"][0] == tokenizer.bos_token_id
    assert record.columns["labels"][0] == -100


def test_separator_last_step_and_limit_are_honoured():
    tokenizer, record = prepared(step_separator=" ##", train_on_last_step_only=True)
    assert tokenizer.decode(record.columns["input_ids"]) == "9.8 or 9.11?0.8 is larger. ##So 9.8. ##"
    assert [label for label in record.columns["labels"] if label != -100] == [0]
    assert record.columns["labels"][-1] == 0
    tokenizer, short = prepared(max_completion_length=5)
    prompt = tokenizer("9.8 or 9.11?")["input_ids"]
    assert len(short.columns["input_ids"]) == len(short.columns["labels"]) == len(prompt) + 5


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"labels": [True]}, "labels"),
        ({"completions": "steps"}, "completions"),
        ({"completions": []}, "completions"),
        ({"completions": ["a", None]}, "completions[1]"),
        ({"labels": [True, "yes"]}, "labels[1]"),
        ({"labels": [True, -1]}, "labels[1]"),
        ({"labels": [True, 1000]}, "labels[1]"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "prompt"),
    ],
)
def test_bad_rows_name_their_key(change, key):
    with pytest.raises(RowError) as caught:
        prepared({**ROW, **change})
    assert caught.value.key == key
