import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from upweight.engine.trees import Forest, fold

# Two letters and short sequences: prefixes, duplicates and empty sequences come up all the time.
token_lists = st.lists(st.lists(st.integers(0, 1) | st.just(70_000), max_size=7), max_size=9)


def forest_of(token_lists: list[list[int]]) -> Forest:
    return fold([np.array(tokens, np.int64) for tokens in token_lists])


def visible(forest: Forest, query: int) -> list[int]:
    return [key for key in range(query + 1) if query < forest.end_N[key]]


@given(token_lists)
def test_each_token_sees_exactly_its_own_prefix(token_lists):
    forest = forest_of(token_lists)
    for tokens, path in zip(token_lists, forest.paths, strict=True):
        assert len(path) == len(tokens)
        for depth, at in enumerate(path):
            assert visible(forest, at) == path[: depth + 1].tolist()
        assert forest.ids_N[path].tolist() == tokens


@given(token_lists)
def test_there_is_one_token_for_each_distinct_prefix(token_lists):
    forest = forest_of(token_lists)
    prefixes = {tuple(tokens[: n + 1]) for tokens in token_lists for n in range(len(tokens))}
    assert len(forest.ids_N) == len(forest.position_N) == len(forest.end_N) == len(prefixes)


@given(token_lists)
def test_positions_count_ancestors(token_lists):
    forest = forest_of(token_lists)
    for at, position in enumerate(forest.position_N):
        assert position == len(visible(forest, at)) - 1


@given(token_lists)
def test_equal_ends_mark_unbranched_segments(token_lists):
    forest = forest_of(token_lists)
    parents = [[None, *visible(forest, at)][-2] for at in range(len(forest.ids_N))]
    for at in range(1, len(forest.ids_N)):
        only_child = parents[at] == at - 1 and parents.count(at - 1) == 1
        assert (forest.end_N[at] == forest.end_N[at - 1]) == only_child


def test_a_group_of_completions_shares_its_prompt():
    forest = forest_of([[5, 6, 9], [5, 6, 7, 8], [5, 6, 7, 7]])
    assert forest.ids_N.tolist() == [5, 6, 7, 7, 8, 9]
    assert forest.position_N.tolist() == [0, 1, 2, 3, 3, 2]
    assert forest.end_N.tolist() == [6, 6, 5, 4, 5, 6]
    assert [path.tolist() for path in forest.paths] == [[0, 1, 5], [0, 1, 2, 4], [0, 1, 2, 3]]


def test_ids_sort_as_numbers_not_as_bytes():
    assert forest_of([[256, 1], [1, 2], [256, 3], [65_536, 4]]).ids_N.tolist() == [1, 2, 256, 1, 3, 65_536, 4]


def test_nothing_folds_to_nothing():
    forest = fold([])
    assert len(forest.ids_N) == 0
    assert forest.paths == []
