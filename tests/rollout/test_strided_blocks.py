"""Blocks along documents: what is sampled, and with which log-probs, against one plain forward for each block."""

import numpy as np
import pytest
import torch

from tiny_models import drawn, tiny
from upweight.engine import Engine
from upweight.errors import UserError
from upweight.methods import EBFT
from upweight.rollout.ebft import StridedBlocks, anchors, with_blocks
from upweight.sampler.in_process import InProcess
from upweight.types import Group, Sampling


def document(length, seed=0, prompt=1, holes=()):
    """A row as prepared data has it."""
    scored = np.arange(length) >= prompt
    for start, stop in holes:
        scored[start:stop] = False
    return {"input_ids": drawn(seed, length).tolist(), "loss_mask": scored.tolist(), "prompt_length": prompt}


def groups_of(*rows):
    return [Group(number, row, row["input_ids"]) for number, row in enumerate(rows)]


def blocks_of(model, method, engine=None):
    engine = engine or Engine(model)
    return StridedBlocks(model, method, InProcess(model, engine=engine, end_ids=()), str)


def plain_logps(model, ids, count, temperature):
    """Log-probs of the last `count` tokens, from the model's own logits."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, -count - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[-count:])[:, None])[:, 0]


def test_anchors_leave_room_for_context_prompt_and_the_true_block():
    method = EBFT(mode="strided", stride=3, context_length=4, generate_max_len=2)
    assert anchors(document(12), method) == [4, 7, 10]
    assert anchors(document(11), method) == [4, 7]
    assert anchors(document(5), method) == []
    assert anchors(document(12, prompt=6), method) == [6, 9]
    later = EBFT(mode="strided", stride=3, context_length=4, generate_max_len=2, min_completion_prefix=2)
    assert anchors(document(12, prompt=6), later) == [8]
    # A turn of somebody else's is not to be imitated.
    assert anchors(document(16, prompt=4, holes=[(8, 9)]), method) == [4, 10, 13]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "mistral"])
@pytest.mark.parametrize(("stride", "size"), [(1, 3), (4, 5), (8, 1)])
def test_log_probs_are_those_of_each_block_alone(kind, stride, size):
    model = tiny(kind).eval()
    method = EBFT(mode="strided", stride=stride, context_length=2, generate_max_len=size, n_samples_per_prompt=3)
    groups = groups_of(document(21, 1), document(13, 2, prompt=5), document(size + 2, 3))
    blocks_of(model, method)(groups, 3, Sampling(size, temperature=0.6, seed=7), None)
    for group in groups:
        starts = anchors(group.row, method)
        assert len(group.completions) == 3 * len(starts)
        for number, one in enumerate(group.completions):
            prefix = group.prompt_ids[: starts[number // 3]]
            right = plain_logps(model, prefix + one.ids, size, 0.6)
            np.testing.assert_allclose(one.logps, right.detach().numpy(), atol=1e-5)
        assert group.extras["anchor"] == [start for start in starts for _ in range(3)]


def test_what_is_sampled_does_not_depend_on_neighbours_ranks_or_waves():
    model = tiny("llama").eval()
    method = EBFT(mode="strided", stride=2, context_length=3, generate_max_len=4)
    rows, sampling = [document(9 + 5 * n, n) for n in range(4)], Sampling(4, temperature=1.0, seed=3)
    together, alone, waves = groups_of(*rows), groups_of(*rows), groups_of(*rows)
    blocks_of(model, method)(together, 2, sampling, None)
    for first in range(4):
        blocks_of(model, method)(alone[first : first + 1], 2, Sampling(4, seed=3, first=first), None)
    small = blocks_of(model, method)
    small.max_scores = 1000
    small(waves, 2, sampling, None)
    for one, two, three in zip(together, alone, waves, strict=True):
        assert (
            [c.ids for c in one.completions] == [c.ids for c in two.completions] == [c.ids for c in three.completions]
        )
    ids = [tuple(one.ids) for group in together for one in group.completions]
    assert len(set(ids)) > len(ids) // 2


def test_samples_follow_the_distribution():
    model = tiny("llama", vocab_size=5).eval()
    method = EBFT(mode="strided", stride=4, context_length=3, generate_max_len=1)
    (group,) = groups_of(document(8, 1) | {"input_ids": [1, 2, 3, 4, 0, 1, 2, 3]})
    blocks_of(model, method)([group], 20000, Sampling(1, temperature=0.7, seed=0), None)
    logits = model(input_ids=torch.tensor([group.prompt_ids])).logits[0, [2, 6]].float() / 0.7
    for block, right in enumerate(logits.softmax(-1)):
        ids = [one.ids[0] for one in group.completions[block * 20000 : (block + 1) * 20000]]
        share = np.bincount(ids, minlength=5) / 20000
        np.testing.assert_allclose(share, right.detach().numpy(), atol=0.015)


def test_where_prefixes_cannot_be_shared_each_block_is_a_completion():
    model = tiny("llama").eval()
    method = EBFT(mode="strided", stride=4, context_length=3, generate_max_len=3)
    groups = groups_of(document(12, 1), document(7, 2))
    blocks_of(model, method, Engine(model, "padded"))(groups, 2, Sampling(3, temperature=0.8, seed=1), None)
    for group in groups:
        for number, one in enumerate(group.completions):
            prefix = group.prompt_ids[: anchors(group.row, method)[number // 2]]
            np.testing.assert_allclose(
                one.logps, plain_logps(model, prefix + one.ids, 3, 0.8).detach().numpy(), atol=1e-4
            )


def test_documents_without_room_for_a_block_are_left_out():
    from datasets import Dataset

    method = EBFT(mode="strided", context_length=4, generate_max_len=4)
    rows = Dataset.from_list([document(20), document(7), document(8)])
    assert [len(row["input_ids"]) for row in with_blocks(rows, method, "training")] == [20, 8]
    with pytest.raises(UserError, match="no document for training has 4 tokens"):
        with_blocks(rows.select([1]), method, "training")
