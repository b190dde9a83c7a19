"""Record what TRL's configs and trainers take: `python -m bench.trl_names`, where trl is installed."""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

RECORD = Path(__file__).parent.parent / "tests" / "train" / "api" / "trl_names.json"
EXPERIMENTAL = {"CPO": "trl.experimental.cpo", "ORPO": "trl.experimental.orpo", "GKD": "trl.experimental.gkd"}
METHODS = ("SFT", "DPO", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "GKD", "Distillation")


def _default(one: dataclasses.Field[Any]) -> Any:
    value = one.default_factory() if callable(one.default_factory) else one.default
    return getattr(value, "value", value)


def main() -> None:
    """Write the arguments and defaults of each config beyond transformers' own, and the arguments of each trainer."""
    stock = {one.name: _default(one) for one in dataclasses.fields(TrainingArguments)}
    found: dict[str, Any] = {"trl": importlib.import_module("trl").__version__, "configs": {}, "trainers": {}}
    for method in METHODS:
        module = importlib.import_module(EXPERIMENTAL.get(method, "trl"))
        config, trainer = getattr(module, f"{method}Config"), getattr(module, f"{method}Trainer")
        fields = {one.name: _default(one) for one in dataclasses.fields(config)}
        changed = {name: value for name, value in fields.items() if name not in stock or stock[name] != value}
        found["configs"][config.__name__] = changed
        found["trainers"][trainer.__name__] = list(inspect.signature(trainer.__init__).parameters)[1:]
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
