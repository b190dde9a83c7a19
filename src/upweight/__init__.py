"""Upweight trains language models from feedback: from one YAML file, or from Python with the trainers named here."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

__version__ = "0.1.0"
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


def __getattr__(name: str) -> Any:
    """The trainers and configs, imported when they are first asked for: `import upweight` stays light."""
    if name not in __all__:
        raise AttributeError(f"module 'upweight' has no attribute {name!r}")
    from upweight.train.api import configs, grpo, trainers

    return next(vars(module)[name] for module in (configs, grpo, trainers) if name in vars(module))


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
