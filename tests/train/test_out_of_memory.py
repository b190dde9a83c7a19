"""A step that runs out of memory is tried again with less, says what it gave up, and computes the same."""

import logging

import pytest
import torch
from torch import nn

from made_runs import OFFLINE, rows_for, trainer_for, write_model, write_online
from upweight.config import load_config
from upweight.engine import activations
from upweight.errors import UserError
from upweight.models.kernels import tiled_mlp
from upweight.models.kernels.tiled_mlp import are_tiled
from upweight.models.memory import smaller_rows
from upweight.train.run import build

COMPARED = ("loss", "grad_norm", "rewards/margins", "logps/chosen")


class SmallCard(nn.Module):
    """A user's layer around a layer of the model, on a card that holds the activations of few tokens."""

    def __init__(self, layer, holds):
        super().__init__()
        self.layer, self.holds, self.failures = layer, holds, 0

    def forward(self, hidden):
        if self.training and torch.is_grad_enabled() and not self.holds(hidden.shape[0] * hidden.shape[1]):
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layer(hidden)


def put_on(trainer, holds):
    card = SmallCard(trainer.model.model.layers[-1].mlp, holds)
    trainer.model.model.layers[-1].mlp = card
    return card


def trained(tmp_path, holds, **options):
    """The log of one step on 64 pairs, on a card that `holds(trainer, tokens)`, the card, and the trainer."""
    method = OFFLINE["dpo"]
    trainer = trainer_for(method, tmp_path, rows=rows_for(method, 64), batch=64, budget=4096, max_steps=1, **options)
    card = put_on(trainer, lambda tokens: holds(trainer, tokens))
    trainer.train()
    return {name: trainer.state.log_history[0][name] for name in COMPARED}, card, trainer


def test_rows_are_cut_until_they_fit(tmp_path, caplog):
    right, calm, usual = trained(tmp_path, lambda trainer, tokens: True)
    largest = usual.runner.packer.largest
    assert calm.failures == 0
    assert largest > 600
    with caplog.at_level(logging.WARNING):
        found, card, trainer = trained(tmp_path, lambda trainer, tokens: tokens <= 280)
    assert found == pytest.approx(right, abs=1e-5)  # nothing of the failed tries is in the gradients or the meters
    assert card.failures == 2
    assert trainer.runner.token_budget == 256
    said = [record.getMessage() for record in caplog.records if "giving up" in record.getMessage()]
    assert f"(token_budget is now {largest // 2})" in said[0]
    assert said[-1] == "out of GPU memory at step 1: giving up larger rows (token_budget is now 256)"
    assert not trainer.model.is_gradient_checkpointing  # smaller rows were enough


def test_then_layers_are_recomputed_and_activations_leave_the_device(tmp_path, caplog):
    right, *_ = trained(tmp_path, lambda trainer, tokens: True)
    with caplog.at_level(logging.WARNING):
        found, *_ = trained(tmp_path, lambda trainer, tokens: trainer.model.is_gradient_checkpointing)
    assert found == pytest.approx(right, abs=1e-5)
    assert "giving up speed ('gradient_checkpointing: true' from now on)" in caplog.text
    assert "activation_offloading" not in caplog.text
    offloads = lambda trainer, tokens: trainer.model.__dict__.get("_offloads_activations")  # noqa: E731
    with caplog.at_level(logging.WARNING):
        found, *_ = trained(tmp_path, offloads)
    assert found == pytest.approx(right, abs=1e-5)
    assert "giving up speed ('activation_offloading: true' from now on)" in caplog.text


def test_gated_blocks_are_tiled_before_activations_leave_the_device(tmp_path, caplog, monkeypatch):
    right, *_ = trained(tmp_path, lambda trainer, tokens: True)
    for module in (tiled_mlp, activations):
        monkeypatch.setattr(module, "TILE", 16)
    with caplog.at_level(logging.WARNING):
        found, *_ = trained(tmp_path, lambda trainer, tokens: are_tiled(trainer.model))
    assert found == pytest.approx(right, abs=1e-5)
    assert "giving up speed ('tiled_mlp: true' from now on)" in caplog.text
    assert "activation_offloading" not in caplog.text


def test_smaller_rows_lower_what_is_tiled(tmp_path, monkeypatch):
    monkeypatch.setattr(tiled_mlp, "TILE", 16)
    optim = {"gradient_checkpointing": True, "tiled_mlp": True}
    *_, trainer = trained(tmp_path, lambda trainer, tokens: tokens <= 280, parts={"optim": optim})
    assert trainer.runner.token_budget == 256
    limits = {vars(module).get("_tile_above") for module in trainer.model.modules()} - {None}
    assert limits == {256}


def test_kept_activations_go_first(tmp_path, caplog):
    options = {"gradient_checkpointing": True, "checkpointing_args": {"keep": 0.5}}
    recomputes = lambda trainer, tokens: all(  # noqa: E731
        layer.gradient_checkpointing for layer in trainer.model.model.layers
    )
    with caplog.at_level(logging.WARNING):
        _, card, trainer = trained(tmp_path, recomputes, parts={"optim": options})
    assert card.failures == 1
    assert "giving up kept activations" in caplog.text
    assert trainer.runner.token_budget == 4096


def test_the_samplers_memory_goes_first_too(tmp_path, caplog):
    trainer = build(load_config(write_online(tmp_path, write_model(tmp_path / "model"), max_steps=1)), trains=True)
    put_on(trainer, lambda tokens: trainer.rollouts.generator.held_bytes() < 64)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "giving up the sampler's memory" in caplog.text


def test_what_was_tried_is_part_of_the_error(tmp_path):
    with pytest.raises(
        UserError, match=r"out of GPU memory in a training step with token_budget 256 \(after "
    ) as error:
        trained(tmp_path, lambda trainer, tokens: False)
    for part in ("larger rows", "'gradient_checkpointing: true'", "'activation_offloading: true'", "'memory: lean'"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("budget", "largest", "unit", "smaller"),
    [
        (4096, 4000, 100, 2000),
        (65_536, 4000, 100, 2000),
        (4096, 4000, 4000, None),
        (300, 300, 20, 256),
        (256, 256, 9, None),
    ],
)
def test_rows_of_several_units_can_be_cut(budget, largest, unit, smaller):
    assert smaller_rows(budget, largest, unit) == smaller
