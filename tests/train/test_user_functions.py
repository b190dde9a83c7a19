"""Users' losses, advantages and methods train from a config and from scripts, resume, and say what changed."""

import json
import math

import pytest
import torch
import yaml

from made_runs import metrics_of, write_config, write_model, write_online
from upweight import DPOConfig, DPOTrainer, GRPOConfig, SFTConfig, SFTTrainer
from upweight.config import load_config
from upweight.doctor.method_check.checks import check
from upweight.doctor.method_check.numbers import UNITS, NumberStep
from upweight.doctor.method_check.targets import methods_of
from upweight.errors import UserError
from upweight.train.api.as_config import build_config
from upweight.train.run import train
from upweight.types import Outputs
from upweight.user_modules import CODE

ONLINE = """
import torch

SEEN = []

def loss(log_ratio, ratio, advantages, mask, lengths, lag, clip: float = 0.2):
    SEEN.append(lag.max().item())
    term = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return (term * mask).sum(1) / lengths, {"mine/log_ratio": log_ratio}

def by_sequence(rewards, groups, scale: float = 1.0):
    mean = torch.zeros(int(groups.max()) + 1).index_reduce(0, groups, rewards, "mean", include_self=False)
    return scale * (rewards - mean[groups])
"""
METHOD = """
from typing import ClassVar
from upweight.methods.base import Method, pair_counts, pair_metrics, required, sequence_mean
from upweight.settings import setting
from upweight.types import Loss

class Margin(Method):
    "Squared distance of a pair's margin from a target."
    data: ClassVar = "pairs"
    reads: ClassVar = frozenset({"entropy_T"})
    target: float = setting("margin.target", 1.0, "Wanted margin.")

    @staticmethod
    def read_row(row):
        return {"prompt": row["question"], "chosen": row["chosen"], "rejected": row["rejected"]}

    def count(self, batch):
        return pair_counts(batch)

    def loss(self, out, batch, prepared):
        chosen_P, rejected_P = sequence_mean(required(out.logps_T), batch)[required(batch.pair_P2)].unbind(1)
        loss_P = (chosen_P - rejected_P - self.target) ** 2
        return Loss({"pairs": loss_P.sum()}, pair_metrics(chosen_P, rejected_P, out, batch))
"""


def changed(file, **keys):
    content = yaml.safe_load(file.read_text())
    content["trl"] = {**content.get("trl", {}), **keys.pop("trl", {})}
    file.write_text(yaml.safe_dump({**content, **keys}))
    return file


def module_in(folder, text):
    name = f"own_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(text)
    return name


def without_last_checkpoint(out, kept):
    assert (out / kept / "whole.json").is_file()
    for folder in out.glob("checkpoint-*"):
        if folder.name != kept:
            (folder / "whole.json").unlink()


def test_functions_train_from_a_config_resume_and_a_changed_file_is_named(model_folder, tmp_path, caplog, monkeypatch):
    name = module_in(tmp_path, ONLINE)
    file = changed(
        write_online(tmp_path, model_folder, max_steps=3, save_steps=1),
        trl={"loss_type": f"{name}.loss", "advantage_estimator": f"{name}.by_sequence", "num_iterations": 2},
        method_args={"clip": 0.3, "scale": 2.0},
    )
    train(load_config(file))
    lines = metrics_of(tmp_path / "out")
    assert {"mine/log_ratio", "entropy"} <= lines[0].keys()
    config = load_config(file)
    assert set(config.method.calls["trl.loss_type"].function.function.__globals__["SEEN"]) == {0.0, 1.0}
    without_last_checkpoint(tmp_path / "out", "checkpoint-2")
    recorded = tmp_path / "out" / "checkpoint-2" / "data.json"
    assert json.loads(recorded.read_text())["code"][f"{name}.loss"] == CODE[f"{name}.loss"]
    monkeypatch.setitem(CODE, f"{name}.loss", {**CODE[f"{name}.loss"], "digest": "0"})  # as if it had been edited
    train(config, resume=True)
    names = ("loss", "grad_norm", "mine/log_ratio", "entropy")  # the others depend on the clock
    again = metrics_of(tmp_path / "out")
    assert [[line[name] for name in names] for line in again] == [[line[name] for name in names] for line in lines]
    assert f"resume: '{name}.loss': {tmp_path / name}.py was changed since; {recorded.parent} was" in caplog.text


def test_a_method_trains_from_a_config_reads_its_rows_and_resumes(model_folder, tmp_path):
    name = module_in(tmp_path, METHOD)
    file = write_config(
        tmp_path, model_folder, rl=f"{name}.Margin", margin={"target": 0.5}, learning_rate=3e-3, num_epochs=4,
        save_steps=4, datasets=[{"path": str(tmp_path / "pairs.jsonl")}],
    )  # fmt: skip
    train(load_config(file))
    lines = metrics_of(tmp_path / "out")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "rewards/margins" in lines[0]
    without_last_checkpoint(tmp_path / "out", "checkpoint-16")
    train(load_config(tmp_path / "out" / "config.yaml"), resume=True)
    assert metrics_of(tmp_path / "out") == lines


def squared(logps, advantages, tau=0.1):
    return (advantages - tau * logps) ** 2


def test_scripts_hand_over_functions(tmp_path):
    args = GRPOConfig(
        str(tmp_path), loss_type=squared, advantage_estimator=lambda rewards: rewards, method_args={"tau": 0.5}
    )
    config = build_config(args)
    assert config.method.calls["trl.loss_type"].function.function is squared
    assert config.method.calls["trl.loss_type"].options == {"tau": 0.5}
    assert args.to_json_string()
    mixed = DPOConfig(str(tmp_path), loss_type=["sigmoid", lambda chosen_log_ratio: chosen_log_ratio])
    assert list(mixed.method().calls) == ["dpo_loss_type[1]"]
    with pytest.raises(UserError, match=r"method_args\.taw: .* Did you mean 'tau'"):
        GRPOConfig(str(tmp_path), loss_type=squared, method_args={"taw": 0.5})


def test_a_script_trains_with_its_loss(model_folder, tmp_path):
    def gentle(chosen_log_ratio, rejected_log_ratio, beta):
        return -torch.tanh(beta * (chosen_log_ratio - rejected_log_ratio)), {"mine/margin": chosen_log_ratio}

    rows = [{"prompt": "say", "chosen": " yes", "rejected": " no"}] * 4
    args = DPOConfig(str(tmp_path), loss_type=gentle, max_steps=2, logging_steps=1, report_to="none", use_cpu=True)
    trainer = DPOTrainer(str(model_folder), args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    assert "mine/margin" in trainer.state.log_history[0]


def test_compute_loss_func_is_a_loss_of_log_probs(model_folder, tmp_path):
    def nll(logps):
        return -2 * logps

    def of_logits(outputs, labels, num_items_in_batch=None):
        return outputs

    rows = [{"text": "the fox"}] * 4
    args = SFTConfig(str(tmp_path), max_steps=1, logging_steps=1, report_to="none", use_cpu=True)
    ours = SFTTrainer(str(model_folder), args=args, train_dataset=rows)
    users = SFTTrainer(str(model_folder), args=args, train_dataset=rows, compute_loss_func=nll)
    assert users.train().training_loss == pytest.approx(2 * ours.train().training_loss, rel=1e-4)
    with pytest.raises(UserError, match="logits are never built whole"):
        SFTTrainer(str(model_folder), args=args, train_dataset=rows, compute_loss_func=of_logits)


ON_GPU = """
import torch
import torch.nn.functional as F

def loss(ratio, advantages, mask, lengths, entropy, clip: float = 0.2):
    term = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return (term * mask).sum(1) / lengths, {"mine/entropy": entropy}

def by_token(rewards, lengths):
    return [(reward - 0.5) * torch.linspace(1, 0, length) for reward, length in zip(rewards, lengths.tolist())]

def pairs(logps, ref_logps, mask, lengths, beta):
    reward = beta * ((logps - ref_logps) * mask).sum(2) / lengths
    return -F.logsigmoid(reward[:, 0] - reward[:, 1]), {"mine/margin": reward[:, 0] - reward[:, 1]}
"""


@pytest.mark.gpu
def test_on_a_gpu_users_functions_train(tmp_path):
    model = write_model(tmp_path / "model", hidden_size=64)  # heads as wide as trees need on a GPU
    for name in ("online", "pairs"):
        (tmp_path / name).mkdir()
    code = module_in(tmp_path, ON_GPU)
    online = changed(
        write_online(tmp_path / "online", model, max_steps=3, bf16=True),
        trl={"loss_type": f"{tmp_path / code}.py:loss", "advantage_estimator": f"{tmp_path / code}.py:by_token"},
    )
    losses = ["sigmoid", f"{tmp_path / code}.py:pairs"]
    pairs = write_config(tmp_path / "pairs", model, max_steps=3, bf16=True, dpo_loss_type=losses)
    for file, metric in ((online, "mine/entropy"), (pairs, "mine/margin")):
        train(load_config(file))
        lines = metrics_of(file.parent / "out")
        assert len(lines) == 3
        assert all(math.isfinite(line[name]) for line in lines for name in ("loss", "grad_norm", metric))


@pytest.mark.gpu
def test_on_a_gpu_losses_wait_for_nothing_and_are_those_of_the_cpu(tmp_path):
    file = tmp_path / f"{module_in(tmp_path, ON_GPU)}.py"
    for name, method in methods_of(str(file), {}, "dpo", tmp_path).items():
        assert [one for one in check(method) if one.problem is not None] == [], name
        out, batch = NumberStep(method).part(range(UNITS))
        expected = method.loss(out, batch, {}).sums
        on_gpu = {key: value.cuda() for key, value in vars(out).items() if isinstance(value, torch.Tensor)}
        arguments = (Outputs(**on_gpu), batch.to("cuda"), {})
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # the checked first calls, which do wait, are behind us
        try:
            sums = method.loss(*arguments).sums
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert {key: value.item() for key, value in sums.items()} == pytest.approx(
            {key: value.item() for key, value in expected.items()}, rel=1e-9
        )
