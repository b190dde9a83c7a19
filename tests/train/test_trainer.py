"""What our trainer changes in transformers' Trainer, and nothing else."""

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from made_runs import OFFLINE, rows_for, timeless, trainer_for, weights_of
from upweight.errors import UserError
from upweight.methods import DPO
from upweight.models.memory import out_of_memory
from upweight.train.trainer import MethodTrainer

OVERRIDDEN = {
    "__init__", "create_model_card", "create_optimizer", "create_scheduler", "evaluate", "floating_point_ops",
    "get_batch_samples", "get_eval_dataloader", "get_train_dataloader", "init_hf_repo", "log", "loss_is_scaled_for_ga",
    "predict", "push_to_hub", "save_model", "train", "training_step",
}  # fmt: skip


def test_few_and_only_public_names_are_overridden():
    ours = {name for name in vars(MethodTrainer) if hasattr(Trainer, name) or name == "loss_is_scaled_for_ga"}
    assert ours - {"__doc__", "__module__", "__annotations__"} == OVERRIDDEN
    assert not any(name.startswith("_") for name in OVERRIDDEN - {"__init__"})


def test_gradient_norms_and_losses_are_those_of_the_whole_step(tmp_path):
    """The Trainer must not divide what is already divided, on any version it comes in."""
    method, rows = OFFLINE["sft"], rows_for(OFFLINE["sft"], 8)
    trainer = trainer_for(method, tmp_path, rows=rows, batch=8, max_steps=1, budget=16)
    loss = trainer.runner.train(trainer.model, trainer.get_train_dataloader().collate_fn(rows)["units"])
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    trainer.model.zero_grad()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_evaluation_does_not_mix_with_training(tmp_path):
    method = OFFLINE["dpo"]
    rows = rows_for(method, 8)
    plain = trainer_for(method, tmp_path, rows=rows)
    plain.train()
    watched = trainer_for(method, tmp_path, rows=rows, eval_dataset=plain.train_dataset, eval_strategy="steps",
                          eval_steps=1)  # fmt: skip
    watched.train()
    found, right = (
        [timeless(line) for line in history if "loss" in line]
        for history in (watched.state.log_history, plain.state.log_history)
    )
    assert found == right
    whole = [line for line in watched.state.log_history if "eval_loss" in line]
    assert len(whole) == 3
    assert whole[0]["eval_rewards/margins"] != 0


class TwoSided(torch.optim.SGD):
    """As schedule-free optimizers are: other weights for evaluation than for training."""

    def eval(self):
        self._scale(0.5)

    def train(self):
        self._scale(2.0)

    def _scale(self, factor):
        if getattr(self, "now", 2.0) != factor:
            self.now = factor
            for group in self.param_groups:
                torch._foreach_mul_([weight.data for weight in group["params"]], factor)


def test_evaluation_and_the_saved_model_have_the_weights_that_the_optimizer_means_for_them(tmp_path):
    trainer = trainer_for(OFFLINE["dpo"], tmp_path, max_steps=1, dtype=torch.bfloat16)
    trainer.eval_dataset = trainer.train_dataset
    trainer.optimizer = TwoSided([p for p in trainer.model.parameters() if p.requires_grad], lr=0.0)
    trainer.copies.follow(trainer.optimizer)
    weight = trainer.model.get_input_embeddings()
    before = weight.weight.float().clone()
    trainer.evaluate()
    assert torch.equal(weight.weight.float(), (before * 0.5).bfloat16().float())
    trainer._optimizer_mode("train")
    assert torch.equal(weight.weight.float(), before)
    trainer.save_model(str(tmp_path / "saved"))
    assert torch.equal(weight.weight.float(), (before * 0.5).bfloat16().float())


def test_evaluating_by_smaller_batches_gives_the_same(tmp_path):
    trainer = trainer_for(OFFLINE["dpo"], tmp_path)
    trainer.eval_dataset = trainer.train_dataset
    first = timeless(trainer.evaluate())
    trainer.args.per_device_eval_batch_size = 1
    assert timeless(trainer.evaluate()) == pytest.approx(first, rel=1e-5, abs=1e-6)


def test_too_few_rows_for_a_batch_are_said_to_be(tmp_path):
    trainer = trainer_for(OFFLINE["dpo"], tmp_path, batch=64, dataloader_drop_last=True)
    with pytest.raises(UserError, match="11 rows cannot fill one batch of 64"):
        trainer.train()


def test_loader_processes_do_not_change_what_is_trained(tmp_path):
    weights = []
    for workers in (0, 2):
        trainer = trainer_for(OFFLINE["dpo"], tmp_path, dataloader_num_workers=workers)
        trainer.train()
        weights.append(weights_of(trainer))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_running_out_of_memory_names_the_next_things_to_try():
    assert "set 'token_budget: 2048'; 'memory: lean'" in out_of_memory("while training", 4096)


def test_a_metric_that_evaluations_lack_is_named(tmp_path):
    held = Dataset.from_list(rows_for(DPO(), 2))
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "nothing", "max_steps": 2}
    with pytest.raises(UserError, match="evaluations have no 'nothing'"):
        trainer_for(DPO(), tmp_path, eval_dataset=held, save_strategy="best", **options).train()
