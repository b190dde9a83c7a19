"""Experts in 4 bits in a script: with a quantization_config and target_parameters of PEFT."""

import logging

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from made_runs import write_model
from upweight import SFTConfig, SFTTrainer
from upweight.errors import UserError
from upweight.models.kernels.packed_product import has_packed_experts

ROWS = [{"prompt": "a b c", "completion": " d e f"}] * 8
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def trainer_of(tmp_path, bits=True, **arguments):
    model = write_model(tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    args = SFTConfig(str(tmp_path / "out"), max_steps=2, report_to="none", use_cpu=True, **arguments)
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32) if bits else None
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)
    return SFTTrainer(str(model), args=args, train_dataset=ROWS, quantization_config=packed, peft_config=lora)


@pytest.mark.parametrize("packed", [True, False])
def test_experts_are_quantised_where_the_script_asks_for_it(tmp_path, packed, caplog):
    pytest.importorskip("bitsandbytes")  # `make test-quant`
    with caplog.at_level(logging.INFO):
        trainer = trainer_of(tmp_path, quantize_moe_experts=packed)
    experts = [
        module for name, module in trainer.model.named_modules() if name.endswith("experts.base_layer.base_layer")
    ]
    assert experts
    assert all(has_packed_experts(module) == packed for module in experts)
    assert ("the experts stay in" in caplog.text) is not packed
    trainer.train()
    moved = [weight for name, weight in trainer.model.named_parameters() if "experts" in name and "lora_B" in name]
    assert all(float(weight.detach().abs().max()) > 0 for weight in moved)


def test_experts_are_quantised_only_while_a_model_is_loaded_in_4_bits(tmp_path):
    with pytest.raises(UserError, match=r"quantize_moe_experts: .*quantization_config=BitsAndBytesConfig"):
        trainer_of(tmp_path, bits=False, quantize_moe_experts=True)


def test_experts_in_4_bits_are_not_sharded(tmp_path):
    with pytest.raises(UserError, match=r"quantize_moe_experts: experts in 4 bits are not sharded\. Drop it"):
        trainer_of(tmp_path, quantize_moe_experts=True, fsdp="full_shard")
