"""How a step is cut into forwards, and over how many ranks, changes nothing that is trained."""

import pytest
import torch

from made_runs import OFFLINE, largest_difference, on_ranks, rows_for, timeless, trainer_for, weights_of
from slow_cases import slow_except
from upweight.methods import METHODS
from upweight.train.distributed.ranks import join_ranks

BUDGETS = (24, 40)  # tokens of a forward; a whole step has more
WORLD = 2
ON_RANKS = ("sft", "dpo", "dpo aot", "kto", "kto all", "orpo", "orm", "prm")


def trained(method, folder, budget):
    """Weights after three steps; the last of them has fewer rows than the others."""
    trainer = trainer_for(method, folder, rows=rows_for(method, 19), batch=8, budget=budget)
    start = weights_of(trainer)
    trainer.train()
    weights = weights_of(trainer)
    assert largest_difference(weights, start) > 1e-4
    return weights, trainer.state.log_history


def test_all_offline_methods_are_here():
    assert {m.name for m in OFFLINE.values()} == {name for name, method in METHODS.items() if not method.online}


@pytest.mark.parametrize("name", slow_except(("sft", "dpo", "kto", "orm"), OFFLINE))
def test_any_cut_into_forwards_trains_the_same_weights(name, tmp_path):
    right, right_log = trained(OFFLINE[name], tmp_path, 100_000)
    for budget in BUDGETS:
        found, log = trained(OFFLINE[name], tmp_path, budget)
        assert largest_difference(found, right) < 1e-6, budget
        for line, right_line in zip(log[:3], right_log[:3], strict=True):
            kept = timeless(right_line)
            assert {k: line[k] for k in kept} == pytest.approx(kept, rel=1e-4, abs=1e-5)


def run_rank(folder, names):
    join_ranks(60)
    for name in names:
        for adapter in (False, True):
            trainer = trainer_for(OFFLINE[name], folder, rows=rows_for(OFFLINE[name], 9), batch=4 // WORLD, budget=64,
                                  adapter=adapter)  # fmt: skip
            trainer.train()
            if trainer.is_world_process_zero():
                torch.save([weights_of(trainer), trainer.state.log_history], f"{folder}/{name}-{adapter}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(run_rank, WORLD, str(folder), ON_RANKS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_train_the_weights_of_one(on_two_ranks, name, adapter, tmp_path):
    """The last of the three steps has one row, so that one rank has nothing to do."""
    trainer = trainer_for(OFFLINE[name], tmp_path, rows=rows_for(OFFLINE[name], 9), batch=4, budget=64, adapter=adapter)
    trainer.train()
    found, log = torch.load(on_two_ranks / f"{name}-{adapter}.pt", weights_only=False)
    assert largest_difference(found, weights_of(trainer)) < 1e-6
    for line, right in zip(log[:3], trainer.state.log_history[:3], strict=True):
        kept = timeless(right)
        assert {k: line[k] for k in kept} == pytest.approx(kept, rel=1e-4, abs=1e-5)
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(right[key], rel=1e-5, abs=1e-6)
