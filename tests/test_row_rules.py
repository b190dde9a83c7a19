"""Rules about rows: which are read, held out, in which order; dropped, cut or refused, with a reason."""

import numpy as np
import pytest

from made_tokenizers import config
from upweight.errors import UserError
from upweight.row_rules import (
    EntryRows,
    RowSection,
    apply_length_rules,
    lengths_of,
    select_from_entry,
    split_rows,
    training_order,
)

TOO_LONG, TOO_SHORT = "longer than sequence_len", "shorter than min_sample_len"
NO_ROOM = "prompt leaves no room for an answer within sequence_len"
NOTHING_LEFT = "nothing to train on within the limits of length"
CUT, PROMPT_CUT = "cut to sequence_len", "prompt cut to max_prompt_length"


def outcome(columns, rl="dpo", pinned=0, **keys):
    chosen = {"rl": rl} if rl else {}
    keys = {"process_reward_model": True, **keys} if "labels" in columns and rl != "grpo" else {**chosen, **keys}
    made = config({}, **keys)
    return apply_length_rules(columns, made.data, made.method, pinned=pinned)


PAIR = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7]}


@pytest.mark.parametrize("strategy", ["drop", "truncate", "raise"])
def test_what_fits_is_kept(strategy):
    assert outcome(PAIR, sequence_len=6, excess_length_strategy=strategy) == (PAIR, None)


def test_pairs():
    assert outcome(PAIR, sequence_len=5) == (None, TOO_LONG)
    cut = outcome(PAIR, sequence_len=5, excess_length_strategy="truncate")
    assert cut == ({**PAIR, "chosen_ids": [4, 5]}, CUT)
    assert outcome(PAIR, sequence_len=3, excess_length_strategy="truncate") == (None, NO_ROOM)
    with pytest.raises(UserError, match="at most 5 tokens"):
        outcome(PAIR, sequence_len=5, excess_length_strategy="raise")
    assert PAIR["chosen_ids"] == [4, 5, 6]


def test_labelled():
    row = {"prompt_ids": [1], "completion_ids": [2, 3, 4], "label": True}
    assert outcome(row, "kto", sequence_len=3) == (None, TOO_LONG)
    cut = outcome(row, "kto", sequence_len=3, excess_length_strategy="truncate")
    assert cut == ({**row, "completion_ids": [2, 3]}, CUT)


def test_prompts_lose_their_beginning_but_for_the_bos():
    assert outcome(PAIR, max_prompt_length=2) == ({**PAIR, "prompt_ids": [2, 3]}, PROMPT_CUT)
    assert outcome(PAIR, max_prompt_length=2, pinned=1) == ({**PAIR, "prompt_ids": [1, 3]}, PROMPT_CUT)
    assert outcome(PAIR, max_prompt_length=1, pinned=1) == ({**PAIR, "prompt_ids": [3]}, PROMPT_CUT)
    row = {"prompt": "x", "prompt_ids": list(range(9))}
    assert outcome(row, "grpo", max_prompt_length=4) == ({**row, "prompt_ids": [5, 6, 7, 8]}, PROMPT_CUT)
    assert outcome(row, "grpo", sequence_len=2) == (row, None)


def test_short_rows_are_dropped():
    assert outcome(PAIR, min_sample_len=7) == (None, TOO_SHORT)
    assert outcome(PAIR, min_sample_len=6) == (PAIR, None)


def test_texts():
    row = {"input_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, True]}
    assert outcome(row, None, sequence_len=3) == (None, TOO_LONG)
    cut = outcome(row, None, sequence_len=3, excess_length_strategy="truncate")
    assert cut == ({"input_ids": [1, 2, 3], "loss_mask": [False, False, True]}, CUT)
    assert outcome(row, None, sequence_len=2, excess_length_strategy="truncate") == (None, NOTHING_LEFT)


def test_steps():
    row = {"input_ids": [1, 2, 3, 4], "labels": [-100, 0, -100, 1]}
    cut = outcome(row, sequence_len=3, excess_length_strategy="truncate")
    assert cut == ({"input_ids": [1, 2, 3], "labels": [-100, 0, -100]}, CUT)
    assert outcome(row, sequence_len=1, excess_length_strategy="truncate") == (None, NOTHING_LEFT)


def test_documents_are_cut_whatever_the_strategy():
    row = {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, True], "prompt_length": 1}
    cut = outcome(row, "ebft", ebft={"mode": "strided"}, sequence_len=3)
    assert cut == ({"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "prompt_length": 1}, CUT)


@pytest.mark.parametrize(
    ("keys", "columns", "expected"),
    [
        ({"rl": "dpo"}, {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5, 6]}, (2, 3, 5)),
        ({"rl": "kto"}, {"prompt_ids": [1, 2], "completion_ids": [3], "label": True}, (2, 1, 3)),
        ({}, {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}, (1, 2, 3)),
        ({"process_reward_model": True}, {"input_ids": [1, 2, 3], "labels": [-100, -100, 1]}, (0, 0, 3)),
        ({"rl": "grpo"}, {"prompt": "a", "prompt_ids": [1, 2]}, (2, 0, 2)),
        ({"rl": "grpo"}, {"prompt": "a", "prompt_ids": [1, 2], "input_ids": 7, "completion_ids": [1] * 9}, (2, 0, 2)),
    ],
)
def test_lengths_of_each_kind_of_record(keys, columns, expected):
    assert lengths_of(columns, config({}, **keys).method) == expected


def test_columns_of_the_user_are_no_tokens():
    row = {"prompt": "x", "prompt_ids": [1, 2], "input_ids": 7, "loss_mask": None, "labels": "a"}
    assert outcome(row, "grpo") == (row, None)


def test_an_evaluation_has_its_limit():
    rules, method = config({}, rl="dpo", sequence_len=5, eval_sequence_len=6).data, config({}, rl="dpo").method
    assert apply_length_rules(PAIR, rules, method) == (None, TOO_LONG)
    assert apply_length_rules(PAIR, rules, method, evaluation=True) == (PAIR, None)


def test_an_entry_is_read_by_shard_and_then_at_random():
    assert select_from_entry(EntryRows(), 4, 0).tolist() == [0, 1, 2, 3]
    assert select_from_entry(EntryRows(shards=3, shards_idx=1), 8, 0).tolist() == [1, 4, 7]
    few = select_from_entry(EntryRows(shards=2, max_samples=3), 20, 0)
    assert len(few) == 3
    assert (few % 2 == 0).all()
    assert (np.diff(few) > 0).all()
    assert select_from_entry(EntryRows(shards=2, max_samples=3), 20, 1).tolist() != few.tolist()


@pytest.mark.parametrize("size", [0, 3, 0.3])
def test_shards_and_splits_use_each_row_once(size):
    counts, used = (5, 1, 7), []
    for shard in range(3):
        rules = RowSection(shard_count=3, shard_index=shard, val_set_size=size)
        for entry, (trained, held) in enumerate(split_rows(rules, counts, 0)):
            used += [(entry, int(row)) for row in (*trained, *held)]
    assert sorted(used) == [(entry, row) for entry, count in enumerate(counts) for row in range(count)]


def test_orders():
    before = training_order(RowSection(shuffle_before_merging=True, shuffle_merged=False), (30, 30), 0)
    assert sorted(before[:30]) == list(range(30))
    assert before[:30].tolist() != list(range(30))
    assert training_order(RowSection(curriculum=True), (3, 3), 0).tolist() == list(range(6))
    assert training_order(RowSection(), (30, 30), 0).tolist() != list(range(60))
