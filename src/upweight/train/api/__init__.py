"""Trainers and configs for Python scripts, with the names and arguments people know from TRL."""

from upweight.train.api.configs import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    PRMConfig,
    RewardConfig,
    SFTConfig,
)
from upweight.train.api.grpo import GRPOTrainer
from upweight.train.api.grpo_config import GRPOConfig
from upweight.train.api.trainers import (
    CPOTrainer,
    DPOTrainer,
    KTOTrainer,
    ORPOTrainer,
    PRMTrainer,
    RewardTrainer,
    SFTTrainer,
)

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "PRMConfig",
    "PRMTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]
