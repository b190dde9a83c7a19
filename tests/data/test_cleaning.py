"""Rows that resemble others, and rows that a user's filter leaves out."""

import random

import numpy as np
import pytest

from upweight.data.cleaning import EvaluationRows, RowShingles, near_duplicates, signature_of
from upweight.errors import UserError

WORDS = [f"word{number}" for number in range(2000)]
PLAIN = RowShingles(None, np.zeros(0, np.uint64))


def text(seed, count=120):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def changed(words, count, seed=0):
    """The text with some words replaced."""
    words = words.split()
    for number in random.Random(seed).sample(range(len(words)), count):
        words[number] = f"other{number}"
    return " ".join(words)


def similarity(first, second):
    a, b = (set(PLAIN({"text": one}).tolist()) for one in (first, second))
    return len(a & b) / len(a | b)


def test_rows_above_the_threshold_are_found_and_others_are_not():
    rows, expected = [], []
    for seed in range(60):
        other = changed(text(seed), 1 if seed % 2 else 12, seed)
        rows += [text(seed), other]
        expected += [False, similarity(text(seed), other) >= 0.8]
    signature_NH = np.stack([signature_of(PLAIN({"text": row})) for row in rows])
    assert sum(expected) == 30
    earlier = near_duplicates(signature_NH, 0.8)
    assert (earlier >= 0).tolist() == expected
    assert (earlier[earlier >= 0] == np.flatnonzero(expected) - 1).all()


def test_one_of_many_alike_is_kept():
    rows = [text(0), *(changed(text(0), 1, seed) for seed in range(40)), text(1)]
    signature_NH = np.stack([signature_of(PLAIN({"text": row})) for row in rows])
    assert np.flatnonzero(near_duplicates(signature_NH, 0.8) < 0).tolist() == [0, 41]
    assert near_duplicates(signature_NH[:0], 0.8).tolist() == []


def test_signatures_estimate_the_similarity():
    pairs = [(text(seed), changed(text(seed), 8, seed)) for seed in range(30)]
    signed = [[signature_of(PLAIN({"text": one})) for one in pair] for pair in pairs]
    error = np.mean([(a == b).mean() for a, b in signed]) - np.mean([similarity(*pair) for pair in pairs])
    assert abs(error) < 0.02


def test_system_texts_other_columns_and_marks_of_roles_do_not_count():
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a b c d"}]
    of_prompt = RowShingles({"prompt"}, PLAIN.common)
    assert of_prompt({"prompt": turns, "id": "7"}).tolist() == PLAIN({"text": "A b  c d"}).tolist()
    assert PLAIN({"text": "2 + 3"}).tolist() != PLAIN({"text": "2 - 3"}).tolist()
    assert len(PLAIN({"text": "日本語の文"})) == 3
    assert len(PLAIN({"text": ""})) == 1


def test_what_many_rows_share_does_not_make_them_alike():
    rows = [{"text": f"{text('instructions', 80)} {text(seed, 9)}"} for seed in range(100)]
    alike = near_duplicates(np.stack([signature_of(PLAIN(row)) for row in rows]), 0.8)
    assert (alike >= 0).sum() > 90
    shingles = RowShingles.of(rows, None)
    assert (near_duplicates(np.stack([signature_of(shingles(row)) for row in rows]), 0.8) < 0).all()


def test_a_long_row_contains_an_evaluation_row():
    rows = EvaluationRows.of(PLAIN({"text": text(seed, 20)}) for seed in range(5))
    assert rows.any_in(PLAIN({"text": f"{text(8)} {text(3, 20)} {text(9)}"}))
    assert rows.any_in(PLAIN({"text": changed(text(3, 20), 1)}))
    assert not rows.any_in(PLAIN({"text": changed(text(3, 20), 5)}))
    assert not rows.any_in(PLAIN({"text": text(8)}))
    assert not EvaluationRows.of([]).any_in(PLAIN({"text": text(8)}))


def row(number, question=None):
    return {"prompt": question or text(number, 30), "chosen": f"good {number}", "rejected": f"bad {number}"}


def test_near_duplicates_are_dropped_and_counted(run):
    rows = [row(number) for number in range(6)]
    rows.insert(3, row(0, changed(text(0, 30), 1)))
    run.write(rows[:2], "more.jsonl")
    entries = [{"path": path, "type": "chatml.prompt_pairs"} for path in ("rows.jsonl", "more.jsonl")]
    found = run(rows, datasets=entries, dataset_near_deduplication=0.7, shuffle_merged_datasets=False)
    assert [part.kept for part in found.report.parts] == [6, 0]
    reason = "resembles an earlier row (dataset_near_deduplication)"
    assert [part.dropped for part in found.report.parts] == [{reason: 1}, {reason: 2}]
    assert found.report.train_rows == len(found.train) == 6
    assert any(f"1 dropped: {reason}" in line for line in found.report.lines())
    assert not (found.folder / "signatures").exists()
    shuffled = run(datasets=entries, dataset_near_deduplication=0.7)
    assert sorted(map(str, shuffled.train)) == sorted(map(str, found.train))
    both = run(datasets=entries, dataset_near_deduplication=0.7, dataset_exact_deduplication=True)
    assert len(both.train) == 6
    assert sum(sum(part.dropped.values()) for part in both.report.parts) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_training_rows_that_contain_evaluation_rows(run, processes):
    run.write([row(3)], "test.jsonl")
    keys = {"test_datasets": [{"path": "test.jsonl", "type": "chatml.prompt_pairs"}], "dataset_num_proc": processes}
    rows = [row(number % 1000) for number in range(1020)]
    warned = run(rows, dataset_contamination_check="warn", **keys)
    reason = "contains an evaluation row (dataset_contamination_check)"
    assert warned.report.parts[0].notes == {reason: 2}
    assert len(warned.train) == 1020
    dropped = run(dataset_contamination_check="drop", **keys)
    assert dropped.report.parts[0].dropped == {reason: 2}
    assert (len(dropped.train), len(dropped.evaluation)) == (1018, 1)


def test_rows_that_a_filter_leaves_out(run):
    (run.folder / "mine.py").write_text("def short(row):\n    return len(row['chosen']) < 7\n")
    entry = {"path": "rows.jsonl", "type": "chatml.prompt_pairs", "filter": "mine.short"}
    found = run([row(number) for number in range(5, 15)], datasets=[entry])
    assert found.report.parts[0].dropped == {"left out by the filter": 5}
    (run.folder / "yours.py").write_text("def broken(row):\n    return row['length'] < 7\n")
    with pytest.raises(UserError, match=r"row 0 .*'yours.broken'.*KeyError: 'length' \(yours.py, line 2\)"):
        run(datasets=[{**entry, "filter": "yours.broken"}])
