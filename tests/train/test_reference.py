"""Reference log-probs computed ahead train the same model without a reference."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from made_runs import OFFLINE, largest_difference, on_ranks, rows_for, trainer_for, weights_of
from upweight import KTOConfig
from upweight.errors import UserError
from upweight.methods import DPO, IPO, KTO
from upweight.train.distributed.ranks import join_ranks
from upweight.train.reference import Precompute, RowsWithReference, with_reference

METHODS = {
    "dpo": DPO,
    "ipo": lambda **more: IPO(beta=1.0, **more),
    "kto": lambda **more: KTO(loss_type="apo_zero_unpaired", **more),
}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_training_is_the_same_without_a_reference(name, adapter, tmp_path):
    rows = rows_for(METHODS[name](), 9)
    plain = trainer_for(METHODS[name](), tmp_path, rows=rows, adapter=adapter, budget=64)
    ahead = trainer_for(METHODS[name](precompute_ref_log_probs=True), tmp_path, rows=rows, adapter=adapter, budget=64)
    assert isinstance(ahead.train_dataset, RowsWithReference)
    assert "array" not in repr(ahead.train_dataset)  # which a notebook shows
    assert ahead.runner.reference is None
    assert plain.runner.reference is not None
    plain.train()
    ahead.train()
    assert largest_difference(weights_of(ahead), weights_of(plain)) < 1e-6


def test_the_base_model_can_be_the_reference_of_an_adapter_that_goes_on(tmp_path):
    trainer = trainer_for(DPO(), tmp_path, adapter=True)
    policy = with_reference(trainer.train_dataset, trainer.model, trainer.runner, Precompute())
    base = with_reference(trainer.train_dataset, trainer.model, trainer.runner, Precompute(no_adapter=True))
    plain = trainer_for(DPO(), tmp_path)
    right = with_reference(plain.train_dataset, plain.model, plain.runner, Precompute())
    assert not np.allclose(policy[3]["ref_chosen_logps"], right[3]["ref_chosen_logps"], atol=1e-3)
    assert np.allclose(base[3]["ref_chosen_logps"], right[3]["ref_chosen_logps"], atol=1e-5)


def test_results_are_kept_by_the_prepared_rows_and_found_by_weights(tmp_path):
    trainer = trainer_for(DPO(), tmp_path)
    first = with_reference(trainer.train_dataset, trainer.model, trainer.runner, Precompute(folder=tmp_path))
    (file,) = tmp_path.glob("reference-*.npz")
    written = file.stat().st_mtime_ns
    again = with_reference(trainer.train_dataset, trainer.model, trainer.runner, Precompute(folder=tmp_path))
    assert file.stat().st_mtime_ns == written
    for number in range(len(first)):
        assert first[number].keys() == again[number].keys()
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            assert np.array_equal(first[number][column], again[number][column])
            assert len(first[number][column]) == len(first[number][column.replace("ref_", "").replace("logps", "ids")])
    with torch.no_grad():
        trainer.model.lm_head.weight[0] += 1e-3
    with_reference(trainer.train_dataset, trainer.model, trainer.runner, Precompute(folder=tmp_path))
    assert len(list(tmp_path.glob("reference-*.npz"))) == 2


def test_a_first_token_that_is_scored_has_no_log_prob(tmp_path):
    rows = [{"prompt_ids": [], "chosen_ids": [5, 6, 7], "rejected_ids": [8, 9]}, *rows_for(DPO(), 3)]
    for row in rows:
        row.pop("margin", None)
    trainer = trainer_for(DPO(precompute_ref_log_probs=True), tmp_path, rows=rows)
    assert trainer.train_dataset[0]["ref_chosen_logps"][0] == 0
    assert len(trainer.train_dataset[0]["ref_chosen_logps"]) == 3
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_kto_with_a_kl_estimate_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="kto_loss_type: apo_zero_unpaired"):
        KTO(precompute_ref_log_probs=True)
    with pytest.raises(UserError, match='loss_type="apo_zero_unpaired"'):
        KTOConfig(output_dir=str(tmp_path), precompute_ref_log_probs=True)


def run_rank(folder):
    join_ranks(60)
    trainer = trainer_for(DPO(precompute_ref_log_probs=True), folder, rows=rows_for(DPO(), 9), batch=2, budget=48)
    if trainer.is_world_process_zero():
        torch.save([row["ref_rejected_logps"] for row in map(trainer.train_dataset.__getitem__, range(9))],
                   f"{folder}/found.pt")  # fmt: skip


def test_two_ranks_find_the_same(tmp_path):
    on_ranks(run_rank, 2, str(tmp_path))
    right = trainer_for(OFFLINE["dpo"].model_copy(update={"precompute_ref_log_probs": True}), tmp_path,
                        rows=rows_for(DPO(), 9))  # fmt: skip
    for number, found in enumerate(torch.load(tmp_path / "found.pt", weights_only=False)):
        assert np.allclose(found, right.train_dataset[number]["ref_rejected_logps"], atol=1e-5)
