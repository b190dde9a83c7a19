"""The policy as it is loaded for training."""

import pytest
import torch

from parity_script import ROWS, TEMPLATE, made_tokenizer
from tiny_models import tiny
from upweight import DPOConfig, DPOTrainer
from upweight.train.policy import CPU_TOKEN_BUDGET, token_budget


@pytest.mark.parametrize(
    ("kind", "name", "coefficient"),
    [
        ("qwen3_moe", "router_aux_loss_coef", 0.01),
        ("qwen3_moe", "router_aux_loss_coef", 0.0),
        ("jetmoe", "aux_loss_coef", 0.01),
    ],
)
def test_a_mixture_whose_routers_loss_is_left_out_says_so(kind, name, coefficient, tmp_path, caplog):
    tokenizer = made_tokenizer(TEMPLATE)
    model = tiny(kind, vocab_size=len(tokenizer), **{name: coefficient})
    args = DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    DPOTrainer(model, args=args, train_dataset=ROWS["pairs"], processing_class=tokenizer)
    assert (f"{name} 0.01" in caplog.text) is (coefficient > 0)


def test_the_token_budget_of_a_cpu_is_fixed():
    config = tiny("llama").config
    assert token_budget(config, torch.device("cpu"), checkpointing=False, reserved=1 << 40) == CPU_TOKEN_BUDGET
