"""Muon and AdamW as one optimizer: who steps what, and that a run goes on as if it had not stopped."""

import copy
import shutil

import pytest
import torch
from torch.optim import AdamW, Muon

from made_runs import metrics_of, write_config
from tiny_models import tiny
from upweight.config import load_config
from upweight.config.sections.training import OptimSection
from upweight.train.optimizers.muon import build_muon
from upweight.train.run import train


def with_gradients(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_matrices_of_layers_are_muons_and_the_rest_is_adamws():
    ours, theirs = with_gradients(tiny("llama")), with_gradients(tiny("llama"))
    theirs.load_state_dict(ours.state_dict())
    optim = OptimSection(learning_rate=0.01, weight_decay=0.1)
    built = build_muon(ours, lr=0.01, weight_decay=0.1, optim=optim)
    named = dict(theirs.named_parameters())
    layers = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    rest = {name: p for name, p in named.items() if not any(p is one for one in layers)}
    muon = Muon(layers, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in rest.values() if p.ndim > 1]},
        {"params": [p for p in rest.values() if p.ndim == 1]},
    ]
    groups[1]["weight_decay"] = 0.0
    adamw = AdamW(groups, lr=0.01, weight_decay=0.1)
    for _ in range(3):
        built.step()
        muon.step()
        adamw.step()
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, named[name]), name
    assert len(layers) > 4


def test_a_checkpoint_and_other_rates_are_followed():
    model = with_gradients(tiny("llama"))
    optim = OptimSection(learning_rate=0.01)
    built = build_muon(model, lr=0.01, weight_decay=0.0, optim=optim)
    built.step()
    other = with_gradients(tiny("llama"))
    other.load_state_dict(model.state_dict())
    again = build_muon(other, lr=0.01, weight_decay=0.0, optim=optim)
    again.load_state_dict(copy.deepcopy(built.state_dict()))
    for one in (built, again):
        one.param_groups[:] = [{**group, "lr": 0.002} for group in one.param_groups]  # as lr_groups are put in place
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
def test_a_run_learns_and_resumes(model_folder, tmp_path):
    keys = {"optimizer": "muon", "max_steps": 6, "save_steps": 3, "learning_rate": 2e-3, "muon_momentum": 0.9}
    config = load_config(write_config(tmp_path, model_folder, num_epochs=None, **keys))
    train(config)
    whole = metrics_of(tmp_path / "out")
    assert whole[-1]["loss"] < whole[0]["loss"]
    for name in ("checkpoint-6", "metrics.jsonl"):
        path = tmp_path / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(config, resume=True)
    assert metrics_of(tmp_path / "out")[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "package"), [("galore_adamw", "galore_torch"), ("apollo_adamw", "apollo_torch")])
def test_projected_optimizers_learn_where_their_package_is(optimizer, package, model_folder, tmp_path):
    pytest.importorskip(package)
    keys = {"optimizer": optimizer, "optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=2"}
    config = write_config(tmp_path, model_folder, num_epochs=None, max_steps=6, learning_rate=5e-3, **keys)
    train(load_config(config))
    losses = [row["loss"] for row in metrics_of(tmp_path / "out") if "loss" in row]
    assert losses[-1] < losses[0]
