"""Scored groups as training samples."""

import numpy as np
import pytest
import torch

from upweight.data.images.records import image_column
from upweight.engine.packing import build_batch, count_batch
from upweight.methods import GRPO
from upweight.rollout.units import units_of_documents, units_of_groups
from upweight.types import Completion, Group, ImageRef


def group(*completions, prompt=(7, 8)):
    return Group(0, {}, list(prompt), list(completions), advantage_S=torch.tensor([0.5, -0.5])[: len(completions)])


def units(*groups, mask_truncated=False, sampler_logps=False):
    return units_of_groups(groups, mask_truncated=mask_truncated, sampler_logps=sampler_logps)


ENDED = Completion([1, 2], [-0.1, -0.2], [0, 0], finished=True)
CUT = Completion([3, 4, 5], [-0.3, -0.4, -0.5], [0, 0, 0], finished=False)


def test_completions_are_scored_and_prompts_are_not():
    first, second = units(group(ENDED, CUT))
    assert first.samples[0].ids.tolist() == [7, 8, 1, 2]
    assert first.samples[0].loss_mask.tolist() == [False, False, True, True]
    assert (first.samples[0].advantage, second.samples[0].advantage) == (0.5, -0.5)
    assert first.samples[0].sampler_logps is None


def test_group_mates_share_a_number():
    assert [unit.group for unit in units(group(ENDED, CUT), group(ENDED))] == [0, 0, 1]


def test_what_an_environment_wrote_is_not_scored():
    turn = Completion([1, 2, 3, 4], [-1.0, -2.0, 0.0, -4.0], [0] * 4, finished=True, sampled=[True, True, False, True])
    sample = units(group(turn), sampler_logps=True)[0].samples[0]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.sampler_logps.tolist() == sample.drawn_logps.tolist() == [-1.0, -2.0, -4.0]


def test_a_truncated_completion_may_be_left_out():
    ended, cut = units(group(ENDED, CUT), mask_truncated=True, sampler_logps=True)
    assert ended.samples[0].loss_mask.any()
    assert not cut.samples[0].loss_mask.any()
    assert len(cut.samples[0].sampler_logps) == 0


def test_unknown_log_probs_stay_unknown():
    sample = units(group(Completion([1], [], [], finished=True)), sampler_logps=True)[0].samples[0]
    assert sample.sampler_logps is None
    assert sample.ids.dtype == np.int64


def test_a_rollout_in_stretches_is_a_unit_of_several_samples():
    early = Completion([4, 5], [-0.4, -0.5], [0, 0], finished=True, sampled=[True, True])
    late = Completion([6, 1], [0.0, -0.1], [0, 0], finished=True, sampled=[False, True], earlier=[early])
    unit, other = units(group(late, ENDED), sampler_logps=True)
    assert [sample.ids.tolist() for sample in unit.samples] == [[7, 8, 6, 1], [7, 8, 4, 5]]
    assert [sample.advantage for sample in unit.samples] == [0.5, 0.5]
    counts = GRPO(**{"loss_type": "dapo"}).count(count_batch([unit, other]))
    assert float(counts["rollout_tokens"]) == 1 + 2 + 2
    by_sequence = GRPO(**{"loss_type": "grpo"})
    assert float(by_sequence.count(count_batch([unit, other]))["sequences"]) == pytest.approx(2)
    assert [sample.share for sample in unit.samples] == pytest.approx([1 / 3, 2 / 3])
    assert build_batch([other]).share_S is None


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_a_failed_completion_is_counted_nowhere(loss_type):
    failed = Completion([], [], [], finished=False, sampled=[], failure="broken")
    method = GRPO(**{"loss_type": loss_type})
    with_failed, without = units(group(failed, ENDED), sampler_logps=True), units(group(ENDED), sampler_logps=True)
    assert method.count(count_batch(with_failed)) == method.count(count_batch(without))
    assert not method.contributes(with_failed[0].samples[0])
    batch = build_batch(with_failed)
    assert batch.sampler_logps_T is not None
    assert len(batch.source_T) == 2


def test_blocks_of_a_document_hold_the_images_before_them():
    first, second = ImageRef("a", "a.png", 2, 9), ImageRef("b", "b.png", 3, 9)
    ids = [1, 9, 9, 2, 3, 9, 9, 9, 4, 5]
    group = Group(0, {"images": image_column([first, second])}, ids)
    group.completions = [Completion([7, 8], [], [], finished=True) for _ in range(6)]
    group.advantage_S = torch.arange(6.0)
    units = units_of_documents([group], [[1, 4, 8]])
    assert [[sample.images for sample in unit.samples] for unit in units] == [[(), (first,), (first, second)]] * 2
    assert [len(sample.ids) for sample in units[0].samples] == [3, 6, 10]
