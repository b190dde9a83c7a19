"""Ranks that share rows train what one rank trains, for every kind of method, under DDP and FSDP2."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from made_rollouts import online_trainer
from made_runs import (
    OFFLINE,
    largest_difference,
    metrics_of,
    on_ranks,
    rows_for,
    timeless,
    trainer_for,
    weights_of,
    write_config,
    write_model,
)
from upweight.config import load_config
from upweight.errors import UserError
from upweight.methods import GDPO, GRPO
from upweight.train.distributed.ranks import context_parallel_group, join_ranks
from upweight.train.run import train

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}}
CASES = {
    "dpo": {"max_grad_norm": 0.05},
    "dpo adapter": {"adapter": True, "parts": {"optim": {"gradient_checkpointing": True}}},
    "dpo aot": {},
    "kto": {},
    "kto sharded": SHARDED,
    "orpo sharded": {**SHARDED, "parts": {"optim": {"gradient_checkpointing": True}}},
    "orm": {},
}
POLICY = {"num_generations": 4, "max_completion_length": 6}
ONLINE = {
    "grpo": GRPO(**{**POLICY, "beta": 0.1, "top_entropy_quantile": 0.8}),
    "gdpo": GDPO(**POLICY),
}
EVALUATED = ("kto",)
CLOCK = ("second", "runtime", "idle")  # in the names of what depends on it


def offline_trainer(case, folder, shares, **changes):
    given = {**CASES[case], **changes}
    method = OFFLINE[case if case in OFFLINE else case.split()[0]]
    given["parts"] = {**CASES[case].get("parts", {}), **changes.get("parts", {})}
    held = {"eval_dataset": rows_for(method, 5)} if case in EVALUATED else {}
    return trainer_for(method, folder, rows=rows_for(method, 9), batch=4 // shares, budget=64, **held, **given)


def trained(trainer, case):
    trainer.train()
    found = {"evaluated": timeless(trainer.evaluate()) if case in EVALUATED else {}}
    log = [{k: v for k, v in row.items() if not any(word in k for word in CLOCK)} for row in trainer.state.log_history]
    weights = weights_of(trainer)
    whole = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}
    return {**found, "log": log, "weights": whole}


def run_rank(folder, shares, size, cases):
    join_ranks(60)
    context = context_parallel_group(size)
    for case in cases:
        if case in ONLINE:
            iterations = 2 if case == "grpo" else 1
            trainer = online_trainer(f"{folder}/{case}", method=ONLINE[case], step=8 // shares, wanted=16 // shares,
                                     world=shares, iterations=iterations, context=context)  # fmt: skip
        else:
            trainer = offline_trainer(case, folder, shares, parts={"context": context})
        found = trained(trainer, case)
        if "sharded" in case and size > 1:
            assert isinstance(trainer.model, FSDPModule)
        if trainer.is_world_process_zero():
            torch.save(found, f"{folder}/{case}.pt")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folders of one rank alone, two that share rows, and four of which two at a time share rows."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("alone", "shared", "both")}
    on_ranks(run_rank, 1, str(folders["alone"]), 1, 1, [*CASES, *ONLINE])
    on_ranks(run_rank, 2, str(folders["shared"]), 1, 2, [*CASES, *ONLINE])
    on_ranks(run_rank, 4, str(folders["both"]), 2, 2, ["kto"])
    return folders


@pytest.mark.slow
@pytest.mark.parametrize(("where", "case"), [*(("shared", case) for case in [*CASES, *ONLINE]), ("both", "kto")])
def test_ranks_that_share_rows_train_what_one_does(ran, where, case):
    right, found = (torch.load(ran[name] / f"{case}.pt", weights_only=False) for name in ("alone", where))
    assert len(right["log"]) >= 3
    for row, other in zip(right["log"], found["log"], strict=True):
        assert other.keys() == row.keys()
        assert timeless(other) == pytest.approx(timeless(row), abs=1e-5, rel=1e-5)
    assert timeless(found["evaluated"]) == pytest.approx(timeless(right["evaluated"]), rel=1e-5)
    assert largest_difference(found["weights"], right["weights"]) < 1e-5


def run_config(file):
    train(load_config(file))


@pytest.mark.slow
def test_a_config_says_so(tmp_path):
    model = write_model(tmp_path / "model")
    lines = {}
    for size in (1, 2):
        (folder := tmp_path / str(size)).mkdir()
        file = write_config(folder, model, context_parallel_size=size, max_steps=2, rows=8, gradient_checkpointing=True)
        on_ranks(run_config, size, file)
        lines[size] = [
            [row[name] for name in ("loss", "grad_norm", "rewards/margins")] for row in metrics_of(folder / "out")
        ]
    assert len(lines[1]) == 2
    for one, two in zip(lines[1], lines[2], strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_processes_must_divide():
    assert context_parallel_group(1) is None
    with pytest.raises(UserError, match="context_parallel_size: 2 does not divide the number of processes, 1"):
        context_parallel_group(2)
