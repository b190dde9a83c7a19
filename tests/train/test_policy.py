"""The policy as it is loaded for training."""

import pytest
import torch

from parity_script import ROWS, TEMPLATE, made_tokenizer
from tiny_models import tiny
from upweight import DPOConfig, DPOTrainer
from upweight.config.sections.training import OptimSection
from upweight.train.policy import CPU_TOKEN_BUDGET, token_budget


@pytest.mark.parametrize(
    ("kind", "name", "asked", "enabled"),
    [
        ("qwen3_moe", "router_aux_loss_coef", None, 0.01),
        ("qwen3_moe", "router_aux_loss_coef", 0.0, 0.0),
        ("qwen3_moe", "router_aux_loss_coef", 0.2, 0.2),
        ("jetmoe", "aux_loss_coef", None, 0.01),
    ],
)
def test_a_script_balances_routers_by_the_models_coefficient_or_its_own(kind, name, asked, enabled, tmp_path):
    tokenizer = made_tokenizer(TEMPLATE)
    model = tiny(kind, vocab_size=len(tokenizer), **{name: 0.01})
    args = DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, router_aux_loss_coef=asked)
    trainer = DPOTrainer(model, args=args, train_dataset=ROWS["pairs"], processing_class=tokenizer)
    assert trainer.router_aux_loss_coef == enabled
    assert trainer.aux_loss_enabled is (enabled > 0)


def test_the_token_budget_of_a_cpu_is_fixed():
    config = tiny("llama").config
    assert token_budget(config, torch.device("cpu"), OptimSection(), reserved=1 << 40) == CPU_TOKEN_BUDGET
