from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from upweight.engine.packing import Forest, bucketed, build_batch, fold, plan_rows, whole_blocks
from upweight.types import Sample, Unit

Layout = Literal["tree", "padded"]
LAYOUTS: tuple[Layout, ...] = ("tree", "padded")


def sample(ids: list[int], scored: list[bool] | None = None, **known) -> Sample:
    """A sample whose tokens are all scored unless it says which."""
    mask = np.ones(len(ids), np.bool_) if scored is None else np.array(scored, np.bool_)
    return Sample(ids=np.array(ids, np.int64), loss_mask=mask, **known)


def logps(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@st.composite
def samples(draw):
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    return sample(ids, draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))


@st.composite
def units(draw):
    return Unit(tuple(draw(st.lists(samples(), min_size=1, max_size=2))), group=draw(st.integers(0, 3)))


unit_lists = st.lists(units(), max_size=8)


def tokens_of(row: list[Unit], layout: Layout) -> int:
    """What a row counts against the budget, by its definition."""
    ids = [one.ids.tolist() for unit in row for one in unit.samples]
    if layout == "padded":
        return len(ids) * max(len(tokens) for tokens in ids)
    return len({tuple(tokens[: n + 1]) for tokens in ids for n in range(len(tokens))})


@pytest.mark.parametrize("layout", LAYOUTS)
@given(unit_lists.filter(len))
def test_sources_are_predecessors_and_rows_of_T_follow_the_sequences(layout, units):
    batch = build_batch(units, layout)
    ids, positions = batch.ids_BN.flatten(), batch.position_BN.flatten()
    all_samples = [one for unit in units for one in unit.samples]
    expected = [
        (number, int(one.ids[at]), int(one.ids[at - 1]), at - 1)
        for number, one in enumerate(all_samples)
        for at in np.flatnonzero(one.loss_mask).tolist()
        if at > 0
    ]
    found = zip(
        batch.sequence_T.tolist(),
        batch.target_T.tolist(),
        ids[batch.source_T].tolist(),
        positions[batch.source_T].tolist(),
        strict=True,
    )
    assert list(found) == expected
    assert batch.num_sequences == len(all_samples)


@given(unit_lists.filter(len))
def test_both_layouts_hold_the_same_content(units):
    tree, padded = build_batch(units, "tree"), build_batch(units, "padded")
    assert tree.end_BN is not None
    assert padded.length_B is not None
    assert torch.equal(tree.target_T, padded.target_T)
    assert torch.equal(tree.sequence_T, padded.sequence_T)
    end, width = tree.end_BN[0], padded.ids_BN.shape[1]
    for in_tree, in_padded in zip(tree.source_T.tolist(), padded.source_T.tolist(), strict=True):
        context = [tree.ids_BN[0, key].item() for key in range(in_tree + 1) if in_tree < end[key]]
        row, column = divmod(in_padded, width)
        assert column < padded.length_B[row]
        assert padded.ids_BN[row, : column + 1].tolist() == context


def test_a_scored_first_token_is_dropped_with_what_is_known_about_it():
    chosen = sample([1, 2, 3], old_logps=logps(-1, -2, -3), prompt=np.array([True, True, False]))
    rejected = sample([1, 2], [False, True], old_logps=logps(-4), prompt=np.array([False]))
    batch = build_batch([Unit((chosen, rejected))])
    assert batch.old_logps_T is not None
    assert batch.prompt_T is not None
    assert batch.target_T.tolist() == [2, 3, 2]
    assert batch.old_logps_T.tolist() == [-2, -3, -4]
    assert batch.prompt_T.tolist() == [True, False, False]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_score_heads_read_the_scored_positions_themselves(layout):
    one = sample([4, 5, 6], [True, False, True], labels=np.array([1, 0]))
    other = sample([4, 7], [False, True], labels=np.array([1]))
    batch = build_batch([Unit((one,)), Unit((other,))], layout, predict=False)
    assert batch.ids_BN.flatten()[batch.source_T].tolist() == [4, 6, 7]
    assert batch.target_T.tolist() == [1, 0, 1]


def test_pairs_are_known_among_others_and_margins_when_all_units_have_one():
    pair, single = (sample([1, 2]), sample([1, 3])), (sample([1, 4]),)
    batch = build_batch([Unit(pair, margin=0.5), Unit(pair, margin=2.0)])
    assert batch.pair_P2 is not None
    assert batch.margin_P is not None
    assert batch.pair_P2.tolist() == [[0, 1], [2, 3]]
    assert batch.margin_P.tolist() == [0.5, 2.0]
    mixed = build_batch([Unit(single), Unit(pair, margin=0.5)])
    assert mixed.pair_P2 is not None
    assert mixed.pair_P2.tolist() == [[1, 2]]
    assert mixed.margin_P is None
    assert build_batch([Unit(single)]).pair_P2 is None


def test_what_only_some_samples_know_is_left_out():
    known = sample([1, 2], advantage=1.5, label=1, ref_logps=logps(0, -1), sampler_logps=logps(0, -2))
    batch = build_batch([Unit((known,)), Unit((known,))])
    assert batch.advantage_S is not None
    assert batch.label_S is not None
    assert batch.ref_logps_T is not None
    assert batch.sampler_logps_T is not None
    assert batch.advantage_S.tolist() == [1.5, 1.5]
    assert batch.label_S.tolist() == [1, 1]
    assert batch.ref_logps_T.tolist() == [-1, -1]
    assert batch.sampler_logps_T.tolist() == [-2, -2]
    partly = build_batch([Unit((known,)), Unit((sample([1, 2]),))])
    assert partly.advantage_S is partly.label_S is partly.ref_logps_T is partly.sampler_logps_T is None


def test_padding_sees_only_itself():
    batch = build_batch([Unit((sample([3, 4]),))], pad_to=lambda length: length + 2)
    assert batch.end_BN is not None
    assert batch.ids_BN.tolist() == [[3, 4, 0, 0]]
    assert batch.end_BN.tolist() == [[2, 2, 3, 4]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_units_make_a_row_that_can_still_be_forwarded(layout):
    batch = build_batch([], layout)
    assert batch.ids_BN.shape == (1, 1)
    assert batch.source_T.tolist() == batch.target_T.tolist() == batch.sequence_T.tolist() == [0]


@given(st.integers(1, 200_000))
def test_buckets_are_few_and_close(length):
    bucket = bucketed(length)
    assert bucket % 128 == 0
    assert length <= bucket < length + max(128, length / 8 + 1)
    assert bucketed(bucket) == bucket


@given(st.integers(0, 200_000))
def test_rows_are_filled_to_whole_blocks(length):
    assert whole_blocks(length) % 128 == 0
    assert max(1, length) <= whole_blocks(length) < max(1, length) + 128


@pytest.mark.parametrize("layout", LAYOUTS)
@given(unit_lists, st.integers(1, 30), st.integers(1, 4))
def test_every_unit_is_in_one_row_within_the_budget(layout, units, budget, ranks):
    plan = plan_rows(units, budget, ranks, layout)
    assert len(plan) == ranks
    assert len({len(rows) for rows in plan}) == 1
    rows = [row for rows in plan for row in rows if row]
    assert sorted(number for row in rows for number in row) == list(range(len(units)))
    for row in rows:
        assert len(row) == 1 or tokens_of([units[number] for number in row], layout) <= budget


@given(unit_lists.filter(len), st.integers(1, 30), st.integers(1, 4))
def test_no_row_is_far_above_the_mean(units, budget, ranks):
    rows = [row for rows in plan_rows(units, budget, ranks) for row in rows]
    members = [[unit for unit in units if unit.group == group] for group in {unit.group for unit in units}]
    whole = [tokens_of(group, "tree") for group in members]
    alone = sum(tokens_of([unit], "tree") for unit in units)
    largest = max(tokens_of([units[number] for number in row], "tree") for row in rows if row)
    assert largest <= alone / len(rows) + max(whole)


def test_groups_stay_whole_while_they_fit():
    prompts = [[group, *range(10, 16)] for group in range(4)]
    units = [Unit((sample([*prompts[n % 4], 20 + n, 21, 22]),), group=n % 4) for n in range(12)]
    (rows,) = plan_rows(units, budget=40)
    assert sorted(rows) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert [len(build_batch([units[n] for n in row]).ids_BN[0]) for row in rows] == [32, 32]


def test_a_group_above_the_budget_is_split_and_repeats_its_prompt():
    units = [Unit((sample([1, 2, 3, 4, 10 + n, 11]),), group=7) for n in range(4)]
    (rows,) = plan_rows(units, budget=8)
    assert sorted(rows) == [[0, 1], [2, 3]]


def test_one_group_is_shared_out_rather_than_leaving_ranks_idle():
    units = [Unit((sample([1, 2, 10 + n, 11, 12]),)) for n in range(8)]
    assert sorted(plan_rows(units, budget=1000, ranks=2)) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_a_rank_without_work_gets_empty_rows():
    assert sorted(plan_rows([Unit((sample([1, 2]),))], budget=10, ranks=3)) == [[[]], [[]], [[0]]]
    assert plan_rows([], budget=10, ranks=2) == [[], []]


def test_a_shared_system_prompt_counts_once_in_a_row():
    units = [Unit((sample([*range(20), 30 + n]),), group=n) for n in range(10)]
    assert plan_rows(units, budget=30) == [[list(range(10))]]


def test_ranks_get_like_sums_of_tokens():
    lengths = [10, 9, 8, 1]
    units = [Unit((sample(list(range(100 * n, 100 * n + length))),), n) for n, length in enumerate(lengths)]
    dealt = plan_rows(units, budget=10, ranks=2)
    assert sorted(sum(lengths[unit] for row in rows for unit in row) for rows in dealt) == [11, 17]  # not 10 and 18


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
