"""Where completions end, who hears of it when, and how a grid shrinks."""

import numpy as np
import pytest

from made_tokenizers import byte_tokenizer
from upweight.sampler.collect import CompletionCollector, StopStrings, smaller_grid

NO_STOPS = StopStrings(None, ())


def feed(rows: CompletionCollector, ids_NB: list[list[int]], block: int, slots: list[list[int]]) -> None:
    ids, at = np.array(ids_NB), np.array(slots)
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        rows.take(start, part, (-part / 10).astype(np.float32), at)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_rows_end_at_end_tokens_and_prompts_are_announced_in_order_of_ending(block: int):
    heard = []
    rows = CompletionCollector(2, 2, 5, ends={0, 9}, stops=NO_STOPS, version=4, done=lambda *told: heard.append(told))
    columns = [[1, 2, 3, 4], [1, 9, 0, 9], [1, 1, 1, 1], [0, 1, 1, 1], [7, 7, 7, 7]]
    feed(rows, columns, block, [[0, 1], [2, 3]])
    assert [number for number, _ in heard] == ([0, 1] if block == 5 else [1, 0])
    assert dict(heard)[0] == rows.completions(0)
    first, second, third, fourth = (*rows.completions(0), *rows.completions(1))
    assert (first.ids, second.ids, third.ids, fourth.ids) == ([1, 1, 1, 0], [2, 9], [3, 0], [4, 9])
    np.testing.assert_allclose(second.logps, [-0.2, -0.9], rtol=1e-6)
    assert second.versions == [4, 4]
    assert all(completion.finished for completion in (first, second, third, fourth))
    assert not rows.alive_S.any()


def test_the_length_limit_is_not_an_end():
    rows = CompletionCollector(1, 1, 2, ends={0}, stops=NO_STOPS, version=0, done=None)
    feed(rows, [[5], [6]], 1, [[0]])
    assert rows.completions(0)[0].ids == [5, 6]
    assert not rows.completions(0)[0].finished


def test_slots_without_a_row_are_ignored():
    rows = CompletionCollector(1, 2, 2, ends=(), stops=NO_STOPS, version=0, done=None)
    feed(rows, [[1, 8, 2], [3, 8, 4]], 2, [[1, -1, 0]])
    assert [completion.ids for completion in rows.completions(0)] == [[2, 4], [1, 3]]


@pytest.mark.parametrize("block", [1, 3, 40])
@pytest.mark.parametrize("stop", ["fox", "k br", "<|im_end|>", "é!"])
def test_stop_strings_cut_after_the_token_that_completes_them(stop: str, block: int):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("The quick brown fox said é! and<|im_end|> more and more of the same")
    rows = CompletionCollector(
        1, 1, len(ids), ends=(), stops=StopStrings(tokenizer, [stop, "never"]), version=0, done=None
    )
    feed(rows, [[token] for token in ids], block, [[0]])
    (found,) = rows.completions(0)
    count = next(n for n in range(len(ids)) if stop in tokenizer.decode(ids[:n]))
    assert found.ids == ids[:count]
    assert found.finished


def test_an_end_token_before_a_stop_string_wins():
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("a fo"), 3, *tokenizer.encode("x stop")]
    rows = CompletionCollector(1, 1, len(ids), ends={3}, stops=StopStrings(tokenizer, ["stop"]), version=0, done=None)
    feed(rows, [[token] for token in ids], len(ids), [[0]])
    assert rows.completions(0)[0].ids[-1] == 3


def test_grids_shrink_to_the_groups_and_members_that_run():
    slots = np.arange(12).reshape(3, 4)
    alive = np.isin(np.arange(12), [1, 3, 8])
    groups, kept, rows = smaller_grid(slots, alive, 0.9)  # pyright: ignore
    assert groups.tolist() == [0, 2]
    assert kept.tolist() == [1, 3, 8, 9]
    assert rows.tolist() == [[1, 3], [8, -1]]


def test_grids_shrink_only_when_it_pays():
    slots = np.arange(12).reshape(3, 4)
    assert smaller_grid(slots, np.isin(np.arange(12), [1, 3, 8]), 0.3) is None
