"""Prepared rows of every kind become the units that the engine packs."""

import numpy as np
import pytest

from upweight.data.units import units_of
from upweight.methods import DPO, KTO, ORM, ORPO, PRM, SFT, SimPO

PAIR = {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10]}
LABELLED = [
    {"prompt_ids": [1], "completion_ids": [10, 11], "label": True},
    {"prompt_ids": [2, 3], "completion_ids": [12], "label": False},
    {"prompt_ids": [4], "completion_ids": [13], "label": True},
]


def ids(unit):
    return [sample.ids.tolist() for sample in unit.samples]


def scored(unit):
    return [sample.loss_mask.tolist() for sample in unit.samples]


def test_text_keeps_its_loss_mask():
    (unit,) = units_of([{"input_ids": [1, 2, 3], "loss_mask": [False, True, False]}], SFT())
    assert (ids(unit), scored(unit)) == ([[1, 2, 3]], [[False, True, False]])


@pytest.mark.parametrize("method", [DPO(), SimPO()])
def test_a_pair_scores_its_answers(method):
    (unit,) = units_of([PAIR], method)
    assert ids(unit) == [[5, 6, 7, 8, 9], [5, 6, 10]]
    assert scored(unit) == [[False] * 2 + [True] * 3, [False] * 2 + [True]]


def test_orpo_may_score_answers_alone():
    (unit,) = units_of([PAIR], ORPO(likelihood_of_prompt=False))
    (plain,) = units_of([PAIR], DPO())
    for sample, other in zip(unit.samples, plain.samples, strict=True):
        assert sample.loss_mask.tolist() == other.loss_mask.tolist()
        assert not sample.prompt.any()


def test_orpo_scores_the_prompt_of_the_chosen_side_too_and_says_which_it_is():
    (unit,) = units_of([PAIR], ORPO())
    chosen, rejected = unit.samples
    assert chosen.loss_mask.all()
    assert chosen.prompt.tolist() == [True, True, False, False, False]
    assert rejected.prompt.tolist() == [False]


def test_known_reference_log_probs_travel_with_their_side():
    (unit,) = units_of([{**PAIR, "ref_chosen_logps": [-1.0, -2.0, -3.0], "ref_rejected_logps": [-4.0]}], DPO())
    assert [sample.ref_logps.tolist() for sample in unit.samples] == [[-1.0, -2.0, -3.0], [-4.0]]
    assert unit.samples[0].ref_logps.dtype == np.float32


def test_a_reward_model_scores_the_last_position_and_knows_the_margin():
    (unit,) = units_of([{**PAIR, "margin": 0.5}], ORM())
    assert scored(unit) == [[False] * 4 + [True], [False] * 2 + [True]]
    assert unit.margin == 0.5
    assert units_of([PAIR], ORM())[0].margin is None


def test_steps_are_scored_where_they_have_a_class():
    (unit,) = units_of([{"input_ids": [1, 2, 3, 4], "labels": [-100, 0, -100, 1]}], PRM())
    (sample,) = unit.samples
    assert sample.loss_mask.tolist() == [False, True, False, True]
    assert sample.labels.tolist() == [0, 1]


def test_kto_pairs_each_prompt_with_the_previous_rows_answer():
    units = units_of(LABELLED, KTO())
    assert [unit.samples[0].label for unit in units] == [1, 0, 1, -1, -1, -1]
    assert [ids(unit)[0] for unit in units[3:]] == [[1, 13], [2, 3, 10, 11], [4, 12]]
    assert [unit.group for unit in units] == [0, 1, 2, 0, 1, 2]
    assert scored(units[4]) == [[False, False, True, True]]


def test_kto_can_pair_every_prompt_with_every_other_answer():
    units = units_of(LABELLED, KTO(kl="all"))
    assert sorted(ids(unit)[0] for unit in units[3:]) == sorted(
        prompt["prompt_ids"] + other["completion_ids"] for prompt in LABELLED for other in LABELLED if prompt != other
    )


def test_kto_without_a_kl_estimate_needs_no_other_pairs():
    assert len(units_of(LABELLED, KTO(loss_type="apo_zero_unpaired"))) == 3


def test_answers_to_one_prompt_with_both_verdicts_are_compared_where_asked():
    bad, good = ({"prompt_ids": [1], "completion_ids": [n], "label": label} for n, label in ((20, False), (21, True)))
    rows = [LABELLED[1], bad, LABELLED[0], good, bad]
    units = units_of(rows, KTO(), compare=True)
    assert [ids(unit) for unit in units[:3]] == [[[2, 3, 12]], [[1, 10, 11], [1, 20]], [[1, 21], [1, 20]]]
    assert [[sample.label for sample in unit.samples] for unit in units[:3]] == [[0], [1, 0], [1, 0]]
    assert [ids(unit) for unit in units[3:]] == [ids(unit) for unit in units_of(rows, KTO())[5:]]


def test_a_single_row_has_no_neighbour():
    assert len(units_of(LABELLED[:1], KTO())) == 1
