"""Learning rates for some of the weights."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from made_runs import OFFLINE, policy_for, trainer_for, weights_of
from upweight.config.sections.model import AdapterSection
from upweight.config.sections.training import OptimSection, RateGroup
from upweight.errors import UserError
from upweight.methods import DPO
from upweight.train.lr_groups import lr_rules


def rates(model, optim=None, adapter=None):
    lr_rule = lr_rules(OptimSection(learning_rate=1.0, **(optim or {})), AdapterSection(**(adapter or {})), model)
    return {name: lr_rule(name, p) for name, p in model.named_parameters() if p.requires_grad} if lr_rule else None


def test_without_any_key_all_rates_are_the_same():
    assert rates(policy_for(DPO())) is None


def test_groups_win_over_embeddings():
    groups = [RateGroup(name="attention", modules=["self_attn", "embed_tokens"], lr=0.5)]
    found = rates(policy_for(DPO()), {"lr_groups": groups, "embedding_lr_scale": 0.1})
    assert found["model.layers.0.self_attn.q_proj.weight"] == 0.5
    assert found["model.embed_tokens.weight"] == 0.5
    assert found["lm_head.weight"] == 0.1
    assert found["model.layers.0.mlp.up_proj.weight"] is None


def test_a_group_that_reaches_nothing_is_refused():
    with pytest.raises(UserError, match=r"lr_groups\[0\].modules: no trained weight's name contains 'atention'"):
        rates(policy_for(DPO()), {"lr_groups": [RateGroup(name="a", modules=["atention"], lr=0.5)]})


def test_lora_plus_lets_b_learn_faster():
    found = rates(policy_for(DPO(), adapter=True), adapter={"plus_ratio": 16.0})
    assert {rate for name, rate in found.items() if "lora_B" in name} == {16.0}
    assert {rate for name, rate in found.items() if "lora_A" in name} == {None}


def test_lora_plus_has_a_rate_for_adapted_embeddings():
    model = get_peft_model(policy_for(DPO()), LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
    found = rates(model, adapter={"plus_ratio": 16.0, "plus_embedding_rate": 0.25})
    assert {rate for name, rate in found.items() if "lora_embedding_" in name} == {0.25}
    assert {rate for name, rate in found.items() if "lora_B" in name} == {16.0}


def test_steps_follow_the_rates_and_decay_and_schedule_stay(tmp_path):
    def lr_rule(name, parameter):
        return 0.0 if "mlp" in name else None

    options = {"weight_decay": 0.1, "lr_scheduler_type": "linear", "optim": "adamw_torch"}
    trainer = trainer_for(OFFLINE["sft"], tmp_path, lr_rule=lr_rule, **options)
    before = weights_of(trainer)
    trainer.train()
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) == ("mlp" in name) for name in before)
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.1]
    assert sum(len(group["params"]) for group in groups) == len(before)
    assert trainer.state.log_history[0]["learning_rate"] == 0.05


def test_a_rate_of_its_own_keeps_its_ratio_over_the_schedule(tmp_path):
    trainer = trainer_for(OFFLINE["sft"], tmp_path, lr_rule=lambda name, _: 0.2 if "mlp" in name else None,
                          lr_scheduler_type="linear")  # fmt: skip
    trainer.train()
    assert trainer.lr_scheduler.base_lrs[-1] == 0.2
    assert trainer.lr_scheduler.base_lrs[0] == 0.05


def test_a_run_that_begins_keeps_the_rates_of_its_own_schedule(tmp_path):
    trainer = trainer_for(OFFLINE["sft"], tmp_path)
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    first = optimizer.param_groups[0]["lr"]
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(first)
