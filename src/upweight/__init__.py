"""Upweight trains language models from feedback: from one YAML file, or from Python with the trainers named here."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.train.api import (
        CPOConfig,
        CPOTrainer,
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        KTOConfig,
        KTOTrainer,
        ORPOConfig,
        ORPOTrainer,
        PRMConfig,
        PRMTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
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
    from upweight.train import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
