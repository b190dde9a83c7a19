import json
from collections import Counter

import numpy as np
import pytest

from upweight.data.stream.feed import RowFeed


class Counting:
    """A source of so many numbers, in order, pass after pass."""

    def __init__(self, name, size, known=True):
        self.where, self.size, self.known, self.taken, self.passes = name, size, known, 0, 0

    def next(self):
        if self.taken == self.size:
            self.taken, self.passes = 0, self.passes + 1
            return None
        self.taken += 1
        return {"row": f"{self.where}{self.taken - 1}"}

    def count(self):
        return self.size if self.known else None

    def identity(self):
        return [self.where, self.size]

    def state(self):
        return {"taken": self.taken, "passes": self.passes}

    def restore(self, state):
        self.taken, self.passes = (0, 0) if state is None else (state["taken"], state["passes"])

    def prefetch(self):
        pass

    def close(self):
        pass


def feed_of(mix, sizes, weights=None, known=True, schedule=None):
    sources = [Counting("abc"[number], size, known) for number, size in enumerate(sizes)]
    return RowFeed(sources, ["a", "b", "c"][: len(sizes)], mix, schedule or ([(0, weights)] if weights else []))


def names(rows):
    return [fed.row["row"] for fed in rows]


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [5, 3, 2], [1, 1, 1], [0.999, 0.0005, 0.0005], [1, 30, 7]])
def test_after_any_number_of_rows_each_source_has_given_its_share(weights):
    feed = feed_of("interleave_over", [10**6] * 3, weights)
    shares = np.array(weights) / sum(weights)
    given = np.zeros(3)
    for taken in range(1, 3000):
        given[feed.take(1)[0].source] += 1
        assert np.abs(given - taken * shares).max() < 1.5


def test_weights_change_with_the_step():
    feed = feed_of("interleave_over", [10**4] * 2, schedule=[(0, [1.0, 0.0]), (10, [1.0, 3.0]), (20, [0.0, 1.0])])
    counts = [Counter(fed.source for fed in feed.take(8, step)) for step in range(30)]
    assert all(count == {0: 8} for count in counts[:10])
    assert all(count == {0: 2, 1: 6} for count in counts[10:20])
    assert all(count == {1: 8} for count in counts[20:])


@pytest.mark.parametrize(
    ("mix", "rows"),
    [
        ("concatenate", ["a0", "a1", "b0", "b1", "b2"]),
        ("interleave_once", ["a0", "b0", "a1", "b1", "b2"]),
        ("interleave_under", ["a0", "b0", "a1", "b1"]),
        ("interleave_over", ["a0", "b0", "a1", "b1", "a0", "b2", "a1"]),
    ],
)
def test_rows_can_be_looked_at_without_taking_them(mix, rows):
    feed, other = feed_of(mix, [2, 3], known=False), feed_of(mix, [2, 3], known=False)
    assert feed.first() == {"row": "a0"}
    assert [row["row"] for row in feed] == rows
    assert names(feed.take(3)) == names(other.take(3))
    assert next(iter(feed)) == {"row": "a0"}
    assert names(feed.take(9)) == names(other.take(9))


def test_sources_without_a_share_do_not_count_for_the_rows_that_are_looked_at():
    feed = feed_of("interleave_over", [2, 3], schedule=[(0, [1.0, 0.0]), (10, [0.0, 1.0])])
    assert [row["row"] for row in feed] == ["a0", "a1"]


def test_how_an_epoch_ends():
    assert len(feed_of("concatenate", [3, 5])) == 8
    assert len(feed_of("interleave_once", [3, 5])) == 8
    assert len(feed_of("interleave_under", [15, 12], [0.7, 0.3])) == 21
    assert len(feed_of("interleave_over", [15, 12], [0.7, 0.3])) == 40
    with pytest.raises(TypeError):
        len(feed_of("interleave_over", [15, 12], known=False))


def test_concatenated_and_once_have_every_row_once_in_each_epoch():
    assert names(feed_of("concatenate", [2, 3]).take(7)) == ["a0", "a1", "b0", "b1", "b2", "a0", "a1"]
    feed = feed_of("interleave_once", [2, 6, 3], [1, 1, 2])
    for _ in range(3):
        rows = names(feed.take(11))
        assert sorted(rows) == sorted({f"{name}{n}" for name, size in zip("abc", (2, 6, 3)) for n in range(size)})  # noqa: B905
    assert Counter(row[0] for row in rows[:4]) == {"a": 1, "b": 1, "c": 2}


def test_interleaved_sources_go_round_and_lose_no_row():
    for mix in ("interleave_under", "interleave_over"):
        counts = Counter(names(feed_of(mix, [2, 6], [1, 1]).take(24)))
        assert set(counts.values()) == {6, 2}
        assert [counts["a0"], counts["b5"]] == [6, 2]


@pytest.mark.parametrize("mix", ["concatenate", "interleave_under", "interleave_over", "interleave_once"])
def test_a_feed_goes_on_from_its_state(mix):
    whole = names(feed_of(mix, [4, 9, 3], [3, 2, 1] if mix != "concatenate" else None).take(60))
    for stop in range(0, 60, 7):
        feed = feed_of(mix, [4, 9, 3], [3, 2, 1] if mix != "concatenate" else None)
        feed.first()
        assert names(feed.take(stop)) == whole[:stop]
        state = json.loads(json.dumps(feed.state())) if stop else None
        later = feed_of(mix, [4, 9, 3], [3, 2, 1] if mix != "concatenate" else None)
        later.restore(state)
        assert names(later.take(60 - stop)) == whole[stop:]
        later.restore(None)
        assert names(later.take(60)) == whole
