"""Activations that go through host memory give the same gradients."""

import torch

from tiny_models import gradients, group, three_levels, tiny
from upweight.engine import Engine
from upweight.engine.check import enable_checkpointing
from upweight.engine.offload import OffloadActivations
from upweight.engine.packing import build_batch


def found(checkpointing, offload):
    model = tiny("llama").train()
    engine = Engine(model)
    if checkpointing:
        enable_checkpointing(model)
    if not offload:
        return gradients(model, engine(model, build_batch(group() + three_levels())).logps_T.sum()), 0
    moved = []

    class Watched(OffloadActivations):
        def _pack(self, tensor):
            packed = super()._pack(tensor)
            moved.extend([tensor] if packed[0] is not None else [])
            return packed

    with Watched(model, smallest=64):
        loss = engine(model, build_batch(group() + three_levels())).logps_T.sum()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not any(tensor.untyped_storage().data_ptr() in weights for tensor in moved)
    return gradients(model, loss), len(moved)


def test_gradients_are_the_same_and_fewer_tensors_move_with_checkpointing():
    counts = []
    for checkpointing in (False, True):
        right, _ = found(checkpointing, offload=False)
        same, moved = found(checkpointing, offload=True)
        assert all(torch.equal(same[name], right[name]) for name in right)
        counts.append(moved)
    assert counts[0] > counts[1] >= 3
