"""Users' losses, advantages, rewards of parts and optimizers by path: two ranks train what one rank trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from made_runs import largest_difference, metrics_of, on_ranks, write_config, write_model, write_online
from upweight.config import load_config
from upweight.train.run import train

WORLD = 2
MINE = '''
import torch
import torch.nn.functional as F


def by_sequence(log_ratio, ratio, advantages, mask, lengths, entropy, clip: float = 0.2):
    term = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return (term * mask).sum(1) / lengths, {"mine/moved": (log_ratio * mask).sum(1), "mine/entropy": entropy}


def by_token(ratio, advantages, ref_logps, logps, beta):
    return -ratio * advantages + beta * (logps - ref_logps) ** 2, {"mine/advantage": advantages}


def centred(rewards, groups):
    mean = torch.zeros(int(groups.max()) + 1).index_reduce(0, groups, rewards, "mean", include_self=False)
    return rewards - mean[groups]


def of_tokens(rewards, groups, lengths):
    """The first tokens of a completion get more of its advantage."""
    each = zip(centred(rewards, groups), lengths.tolist())
    return [value * torch.linspace(2, 0, length) for value, length in each]


def letters(completion_ids, **columns):
    return [[float(token % 3) for token in ids] for ids in completion_ids]


def margin(chosen_log_ratio, rejected_log_ratio, lengths, beta):
    mean = beta * (chosen_log_ratio / lengths[:, 0] - rejected_log_ratio / lengths[:, 1])
    return F.softplus(-mean), {"mine/mean": mean}


def kto(log_ratio, desirable, kl, beta):
    return torch.sigmoid(torch.where(desirable, -1.0, 1.0) * beta * (log_ratio - kl))


class Momentum(torch.optim.Optimizer):
    """Heavy ball; knows nothing of ranks or shards."""

    def __init__(self, params, lr, momentum: float = 0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    speed = self.state[weight].setdefault("speed", torch.zeros_like(weight))
                    speed.mul_(group["momentum"]).add_(weight.grad)
                    weight.add_(speed, alpha=-group["lr"])


def only_layers(model, lr):
    chosen = [weight for name, weight in model.named_parameters() if "layers" in name]
    return torch.optim.SGD(chosen, lr=lr, momentum=0.5)
'''
LABELLED = [{"prompt": f"say {n}", "completion": f"it is {n}", "label": n % 3 != 0} for n in range(16)]
SIGMOID = {"optimizer": "sgd", "learning_rate": 0.1}
SHARDED = {"optimizer": "rank_code.Momentum", "learning_rate": 0.1}
ONLINE = {
    "grpo": {"loss_type": "rank_code.by_sequence", "advantage_estimator": "rank_code.centred", "num_iterations": 2},
    "tokens": {
        "loss_type": "rank_code.by_token",
        "advantage_estimator": "rank_code.of_tokens",
        "beta": 0.1,
        "num_iterations": 2,
    },
    "parts": {
        "loss_type": "rank_code.by_sequence",
        "reward_funcs": ["rank_code.letters"],
        "reward_to_go": True,
        "gamma": 0.9,
    },
}
OFFLINE = {
    "dpo": {"dpo_loss_type": ["sigmoid", "rank_code.margin"], "dpo_loss_weights": [1.0, 0.5], **SIGMOID},
    "kto": {"rl": "kto", "kto_loss_type": "rank_code.kto", **SIGMOID},
    "optimizer": {"optimizer": "rank_code.Momentum", "optim_args": {"momentum": 0.8}, "learning_rate": 0.1},
    "sharded optimizer": {**SHARDED, "fsdp": True},
    **{f"zero{stage}": {**SHARDED, "deepspeed": f"zero{stage}.json"} for stage in (1, 2, 3)},
    "sharded function": {"optimizer": "rank_code.only_layers", "fsdp": True, "learning_rate": 0.1},
}


def written(case: str, folder: Path, model: Path, ranks: int) -> Path:
    """A config of a case that gives every rank its part of a step."""
    folder.mkdir()
    (folder / "rank_code.py").write_text(MINE)
    keys: dict[str, Any] = {"max_steps": 4, "save_steps": 2}
    if case in ONLINE:
        file = write_online(folder, model, micro_batch_size=8 // ranks, **keys, **SIGMOID)
        content = yaml.safe_load(file.read_text())
        content["trl"] |= {"reward_num_workers": 1, **ONLINE[case]}
        file.write_text(yaml.safe_dump(content))
        return file
    if case == "kto":
        (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LABELLED))
        keys["datasets"] = [{"path": str(folder / "labelled.jsonl")}]
    more = {name: value for name, value in OFFLINE[case].items() if ranks > 1 or name not in ("fsdp", "deepspeed")}
    return write_config(folder, model, micro_batch_size=2 // ranks, **{**keys, **more})


def run(file, resume=False):
    train(load_config(file), resume=resume)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ONLINE, *OFFLINE])
def test_two_ranks_train_the_weights_of_one(case, model, tmp_path):
    if case.startswith("zero"):
        pytest.importorskip("deepspeed")
    run(written(case, tmp_path / "one", model, 1))
    on_ranks(run, WORLD, written(case, tmp_path / "two", model, WORLD))
    right, found = tmp_path / "one" / "out", tmp_path / "two" / "out"
    weights, start = load_file(right / "model.safetensors"), load_file(model / "model.safetensors")
    assert largest_difference(weights, start) > 1e-4
    assert largest_difference(load_file(found / "model.safetensors"), weights) < 1e-5
    names = ("loss", "grad_norm", "kl", "mine/moved", "mine/entropy", "mine/advantage", "mine/mean")
    for line, other in zip(metrics_of(found), metrics_of(right), strict=True):
        kept = {name: value for name, value in other.items() if name in names}
        assert {name: line[name] for name in kept} == pytest.approx(kept, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sharded optimizer", "zero2", "zero3"])
def test_the_state_of_a_sharded_optimizer_is_resumed(case, model, tmp_path):
    if case.startswith("zero"):
        pytest.importorskip("deepspeed")
    file, out = written(case, tmp_path / "two", model, WORLD), tmp_path / "two" / "out"
    on_ranks(run, WORLD, file)
    right, result = metrics_of(out), load_file(out / "model.safetensors")
    (out / "checkpoint-4" / "whole.json").unlink()
    (out / "model.safetensors").unlink()
    on_ranks(run, WORLD, file, True)
    assert metrics_of(out) == right
    assert largest_difference(load_file(out / "model.safetensors"), result) == 0
