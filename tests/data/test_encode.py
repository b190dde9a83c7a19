"""From `type` to encoder: names, and rows that are wrong in every way."""

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from made_tokenizers import byte_tokenizer, config, encoder
from upweight.config.peers import FORMAT_NAMES
from upweight.config.sections.data import DatasetSpec
from upweight.config.view import view
from upweight.data.encode import RowError, build_encoder
from upweight.data.formats import FORMATS
from upweight.data.raw_row import Row
from upweight.errors import UserError
from upweight.log import _warned
from upweight.row_rules import apply_length_rules


def test_the_config_knows_the_formats():
    assert {kind: set(formats) for kind, formats in FORMATS.items()} == {
        kind: set(names) for kind, names in FORMAT_NAMES.items()
    }


@pytest.mark.parametrize(
    ("entry", "keys", "tokens", "key"),
    [
        ({"type": "chatml.intel"}, {"rl": "dpo"}, "llama3", "datasets.type"),
        ({"type": "bradley_terry.llama3.icr"}, {"reward_model": True}, "chatml", "datasets.type"),
        ({"type": "alpaca:chatml"}, {}, "plain", "datasets.type"),
        ({"type": "chat_template"}, {"chat_template": "chatml"}, "gemma", "chat_template"),
        ({"type": "chatml.intel"}, {"rl": "dpo"}, "chatml", None),
        ({"type": "llama3.intel"}, {"rl": "dpo"}, "llama3", None),
        ({"type": "chat_template.argilla"}, {"rl": "dpo"}, "gemma", None),
    ],
)
def test_marks_of_turns_that_are_no_tokens_are_warned_of(entry, keys, tokens, key, caplog):
    _warned.clear()
    encoder(entry, byte_tokenizer(tokens), **keys)
    assert ("which are no tokens of this model: they are split like other text" in caplog.text) == (key is not None)
    assert caplog.text.count("warning: ") == (key is not None)
    assert key is None or f"warning: {key}: '" in caplog.text


@pytest.mark.parametrize(
    ("keys", "name", "said"),
    [
        ({"rl": "dpo"}, "chatml.intl", "Did you mean 'chatml.intel'"),
        ({"rl": "dpo"}, "stepwise_supervised.default", "is for process_reward_model: true, not for rl: dpo"),
        ({"rl": "kto"}, "ebft_opencode.transform", "is for rl: ebft, not for rl: kto"),
        (
            {"process_reward_model": True},
            "chatml.intel",
            "is for rl: dpo, .*, reward_model: true, not for process_reward_model: true",
        ),
    ],
)
def test_unknown_and_misplaced_names(keys, name, said):
    with pytest.raises(UserError, match=said):
        encoder({"type": name}, **keys)


def test_a_mapping_of_columns_serves_where_there_are_columns_to_map():
    with pytest.raises(UserError, match="does not serve"):
        encoder({"type": {"field_prompt": "x"}}, process_reward_model=True)


TALK = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
ROWS = {
    "pairs": {
        "system": "s", "instruction": "q", "input": "q", "question": "q", "prompt": "q", "messages": TALK[:1],
        "chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "e"}], "margin": 1.5,
        "chosen_response": "c", "rejected_response": "r",
        "answers": [{"answer": "x", "rank": 1}, {"answer": "y", "rank": 2}],
        "tools": [{"name": "f", "parameters": {}}],
    },
    "labelled": {
        "system": "s", "instruction": "q", "input": "q", "question": "q", "prompt": "q", "messages": TALK[:1],
        "chosen": TALK, "rejected": TALK, "completion": TALK, "label": True,
        "chosen_response": "c", "rejected_response": "r",
        "answers": [{"answer": "x", "rank": 1}, {"answer": "y", "rank": 2}],
    },
    "steps": {"prompt": "q", "completions": ["a", "b"], "labels": [True, 0]},
    "text": {
        "messages": TALK, "instruction": "i", "input": "x", "output": "o", "text": "t t", "prompt": "p",
        "completion": "c", "input_ids": [1, 2], "labels": [-100, 2], "system": "s", "response": "r", "question": "q",
        "answer": "a", "choices": ["x", "y"], "solution": "s", "article": "t", "context": "t", "generation": "g",
        "segments": [{"label": False, "text": "a"}, {"label": True, "text": "b"}], "category": "c", "summary": "s",
        "conversations": [{"role": "human", "value": "h"}, {"role": "bot", "value": "b"}],
    },
    "prompts": {"prompt": TALK[:1], "messages": TALK[:1], "answer": "4", "extra": {"a": [1, None]}},
    "ebft": {
        "messages": TALK, "input": "i i", "output": "o o", "prompt": "p", "ground_truth": "g", "text": "t t",
        "input_ids": [1, 2], "labels": [-100, 2],
    },
}  # fmt: skip
TEXT_ROWS = {**ROWS["pairs"], "chosen": "c d", "rejected": "e"}
METHODS = {
    "pairs": ({"rl": "dpo"}, {"rl": "orpo"}, {"reward_model": True}),
    "labelled": ({"rl": "kto"},),
    "steps": ({"process_reward_model": True},),
    "text": ({},),
    "prompts": ({"rl": "grpo"},),
    "ebft": ({"rl": "ebft", "ebft": {"mode": "structured"}}, {"rl": "ebft", "ebft": {"mode": "strided"}}),
}
ODD = [
    None, "", " ", 0, 7, -1.5, float("nan"), True, [], {}, [None], [[]], [{}], ["x", 1], {"a": None}, {"role": "user"},
    [{"role": "user", "content": None}], [{"role": "?", "content": "x"}], [{"role": "assistant", "content": ""}],
    "\ud800", "a\udfffb", "\0", "\u202e\u200b\ufeff", "🏳️‍🌈" * 5, "<|im_end|>", "<|im_start|>assistant\n",
    "{{ x }}{% if %}", b"bytes", object(), [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [5]}], np.array([1, 2]), torch.tensor([1, 2]),
]  # fmt: skip


def mutated(row, rng):
    """A row with one to three places removed or replaced, at any depth."""
    row = copy.deepcopy(row)
    for _ in range(rng.randint(1, 3)):
        holder, key = row, rng.choice(list(row) or ["x"])
        while rng.random() < 0.5 and isinstance(inner := _get(holder, key), dict | list) and inner:
            holder, key = inner, rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
        if rng.random() < 0.2 and isinstance(holder, dict):
            holder.pop(key, None)
        elif rng.random() < 0.2 and isinstance(inner := _get(holder, key), list) and inner:
            inner.append(copy.deepcopy(rng.choice([rng.choice(inner), rng.choice(ODD)])))
        elif isinstance(holder, list) or key in holder:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return row


def _get(holder, key):
    return holder.get(key) if isinstance(holder, dict) else holder[key]


def encoders(tokenizer):
    """An encoder for every format of every kind, and for rows without a type."""
    for kind, methods in METHODS.items():
        for keys in methods:
            made = config({}, chat_template="chatml", **keys)
            for name in (None, *FORMAT_NAMES[kind]):
                entry = DatasetSpec(path="x", type=name)
                yield kind, build_encoder(made.data, made.method, entry, 0, tokenizer, view(made), Path())


def test_mutated_rows_are_records_or_name_their_key():
    rng = random.Random(0)
    tokenizer = byte_tokenizer("llama3")
    everything = list(encoders(tokenizer))
    records, errors = [], []
    for number in range(3000):
        kind, made = everything[number % len(everything)]
        row = mutated(TEXT_ROWS if kind == "pairs" and rng.random() < 0.5 else ROWS[kind], rng)
        try:
            found = made(row)
            records += [apply_length_rules(record.columns, made.setup.data, made.setup.method) for record in found]
        except (RowError, UserError) as error:
            errors.append(error)
    named = [error for error in errors if isinstance(error, RowError)]
    assert len(records) > 500
    assert len(named) > 500
    assert all(error.key and error.expected for error in named)
    assert all("strided" in str(error) for error in errors if error not in named)
    assert all(isinstance(columns, dict) or reason for columns, reason in records)


def test_a_row_that_is_no_mapping():
    with pytest.raises(RowError):
        encoder({}, rl="dpo")(["x"])  # pyright: ignore[reportArgumentType]


def test_an_array_where_a_number_belongs_is_a_bad_row():
    with pytest.raises(RowError, match="'rank': expected a finite number, got a ndarray"):
        Row({"rank": np.array([1, 2])}).optional_number("rank")
    assert Row({"rank": ""}).optional_number("rank") is None
