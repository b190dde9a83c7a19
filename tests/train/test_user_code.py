"""Callbacks, optimizers and schedules of the user's, named by path in a config."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from made_runs import largest_difference, metrics_of, write_config
from upweight.config import load_config, parse_config
from upweight.errors import UserError
from upweight.runs.checkpoints import checkpoints_of
from upweight.train.machine_checks import check_machine
from upweight.train.run import build, train
from upweight.train.user_code import load_user_code

MINE = '''
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class Count(TrainerCallback, ExportableState):
    """Counts steps, over a resume too."""

    def __init__(self, by: int = 1):
        self.by, self.steps = by, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += self.by

    def metrics(self, state, logs):
        return {"mine/steps": self.steps}

    def state(self):
        return {"args": {"by": self.by}, "attributes": {"steps": self.steps}}


class Fail(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("no more")


class Wordy(TrainerCallback):
    def metrics(self, state, logs):
        return ["many"]


class Sign(torch.optim.Optimizer):
    """Follows the sign of a running mean of gradients."""

    def __init__(self, params, lr, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.lerp_(weight.grad, 1 - group["momentum"])
                    weight.add_(mean.sign(), alpha=-group["lr"])


class Falls(torch.optim.SGD):
    def step(self, closure=None):
        return self.param_groups[5]


def makes_falls(model, lr):
    return Falls(model.parameters(), lr=lr)


class Breaks(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [group["lr"] / (1 - self.last_epoch) for group in self.optimizer.param_groups]


def only_layers(model, lr, weight_decay):
    return torch.optim.SGD([p for n, p in model.named_parameters() if "layers" in n], lr=lr, weight_decay=weight_decay)


def halves(step, num_training_steps, num_warmup_steps, floor: float = 0.0):
    assert num_training_steps == 12
    return max(0.5 ** (step // 3), floor)


def backwards(step):
    return -1.0


def nothing(model):
    return model


def no_schedule(optimizer):
    return None


def unasked(rate):
    return rate
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


KEYS = {
    "callbacks": [{"mine.Count": {"by": 2}}],
    "optimizer": "mine.Sign",
    "optim_args": {"momentum": 0.5},
    "lr_scheduler": "mine.halves",
    "lr_scheduler_kwargs": {"floor": 0.2},
    "learning_rate": 1e-3,
}


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_resumed_run_keeps_their_states(folder, model_folder):
    file = write_config(folder, model_folder, save_steps=4, **KEYS)
    train(load_config(file))
    whole = folder / "out"
    rows = metrics_of(whole)
    assert [row["mine/steps"] for row in rows] == [2 * row["step"] for row in rows]
    rates = [1e-3 * max(0.5 ** ((row["step"] - 1) // 3), 0.2) for row in rows]
    assert [row["learning_rate"] for row in rows if "learning_rate" in row] == pytest.approx(rates)
    (_, last), *_ = checkpoints_of(whole)
    states = torch.load(last / "optimizer.pt", weights_only=True)["state"]
    assert all(list(state) == ["mean"] for state in states.values())
    again = folder / "again"
    shutil.copytree(whole, again)
    for step, checkpoint in checkpoints_of(again):
        if step > 4:
            (checkpoint / "whole.json").unlink()
    (again / "model.safetensors").unlink()
    train(load_config(file, [f"output_dir={again}"]), resume=True)
    assert metrics_of(again) == rows
    assert largest_difference(weights(again), weights(whole)) == 0


def test_a_function_may_choose_the_weights_and_torch_has_schedules(folder, model_folder):
    keys = {"optimizer": "mine.only_layers", "lr_scheduler": "torch.optim.lr_scheduler.StepLR", "weight_decay": 0.1}
    keys |= {"lr_scheduler_kwargs": {"step_size": 5, "gamma": 0.1}, "max_steps": 2, "learning_rate": 1e-2}
    trainer = build(load_config(write_config(folder, model_folder, **keys)))
    optimizer, schedule = trainer.create_optimizer(), trainer.create_scheduler(2)
    names = {p: n for n, p in trainer.model.named_parameters()}
    assert all("layers" in names[p] for group in optimizer.param_groups for p in group["params"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]
    assert (schedule.step_size, schedule.gamma) == (5, 0.1)


@pytest.mark.parametrize(
    ("keys", "message", "line"),
    [
        ({"callbacks": ["mine.Fail"]}, "callbacks[0]: 'mine.Fail' failed in on_step_end: RuntimeError: no", "raise"),
        ({"callbacks": ["mine.Wordy"]}, "callbacks[0]: 'mine.Wordy': metrics returned a list, not a dict", None),
        ({"optimizer": "mine.Falls"}, "optimizer: 'mine.Falls' failed in step: IndexError: ", "[5]"),
        ({"optimizer": "mine.makes_falls"}, "optimizer: 'mine.makes_falls' failed in step: IndexError: ", "[5]"),
        ({"lr_scheduler": "mine.Breaks"}, "lr_scheduler: 'mine.Breaks' failed in step: ZeroDivisionError: ", "/ (1"),
    ],
)  # fmt: skip
def test_what_fails_during_training_names_path_and_line(folder, model_folder, keys, message, line):
    with pytest.raises(UserError) as error:
        train(load_config(write_config(folder, model_folder, learning_rate=1e-3, max_steps=3, **keys)))
    assert str(error.value).startswith(message)
    if line is not None:
        number = next(number for number, text in enumerate(MINE.split("\n"), 1) if line in text)
        assert str(error.value).endswith(f" (mine.py, line {number})")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"callbacks": ["mine.Cuont"]}, "callbacks[0]: "),
        ({"callbacks": ["mine.Sign"]}, "callbacks[0]: 'mine.Sign' is no subclass of transformers.TrainerCallback"),
        ({"callbacks": [{"mine.Count": {"bye": 1}}]}, "callbacks[0].mine.Count.bye: 'mine.Count' has no such setting"),
        ({"callbacks": [{"mine.Count": {"by": "x"}}]}, "callbacks[0].mine.Count.by: "),
        ({"optimizer": "mine.Count"}, "optimizer: 'mine.Count' is no subclass of torch.optim.Optimizer"),
        ({"optimizer": "mine.Sign", "optim_args": {"beta": 1}}, "optim_args.beta: 'mine.Sign' has no such setting"),
        ({"optimizer": "other.Sign"}, "optimizer: there is no 'other'"),
        ({"lr_scheduler": "mine.halfs"}, "has no function 'halfs'. Did you mean 'halves'?"),
        ({"lr_scheduler": "mine.unasked"}, "'mine.unasked' asks for 'rate', which is neither passed"),
        ({"lr_scheduler": "mine.halves", "lr_scheduler_kwargs": {"flor": 1}}, "lr_scheduler_kwargs.flor: "),
        ({"lr_scheduler": "mine.Fail"}, "lr_scheduler: 'mine.Fail' asks for neither 'step' nor 'optimizer'"),
    ],
)
def test_wrong_names_and_options_are_said_before_anything_is_loaded(folder, keys, message):
    base = {"base_model": "m", "rl": "dpo", "datasets": [{"path": "rows.jsonl"}], "output_dir": str(folder / "out")}
    problems = "\n".join(check_machine(parse_config({**base, **keys}, folder=folder)))
    assert message in problems


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr_scheduler": "mine.backwards"}, "lr_scheduler: 'mine.backwards' returned -1.0 at step 0, not a factor"),
        ({"lr_scheduler": "mine.no_schedule"}, "lr_scheduler: 'mine.no_schedule' returned a NoneType, not an LRSched"),
        ({"optimizer": "mine.nothing"}, "optimizer: 'mine.nothing' returned a Linear, not a torch.optim.Optimizer"),
    ],
)
def test_what_they_return_is_checked(folder, keys, message):
    base = {"base_model": "m", "rl": "dpo", "datasets": [{"path": "rows.jsonl"}]}
    code = load_user_code(parse_config({**base, **keys}, folder=folder))
    model = torch.nn.Linear(1, 1)
    made = (
        (lambda: code.schedule(torch.optim.SGD(model.parameters(), lr=1.0), 10, 0))
        if code.optimizer is None
        else (lambda: code.optimizer[0]()(model, **code.optimizer[1]))
    )
    with pytest.raises(UserError) as error:
        made()
    assert message in str(error.value)


def test_a_name_that_is_neither_known_nor_a_path_is_explained():
    with pytest.raises(UserError) as error:
        parse_config({"base_model": "m", "datasets": [{"path": "d"}], "lr_scheduler": "cosin"}, folder=Path())
    assert "warmup_stable_decay or the path of your code, got 'cosin'. Did you mean 'cosine'?" in str(error.value)
