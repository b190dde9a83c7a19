"""Learning rates per parameter group: `lr_groups`, embeddings and LoRA+."""

from collections.abc import Callable
from typing import Any

from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from upweight.config.sections.model import AdapterSection
from upweight.config.sections.training import OptimSection
from upweight.errors import UserError
from upweight.models.adapters.attach import embedding_names
from upweight.models.modules import unwrap_peft

LrRule = Callable[[str, nn.Parameter], float | None]


def lr_rules(optim: OptimSection, adapter: AdapterSection, model: nn.Module) -> LrRule | None:
    """Return a function from a weight to its rate (None: the common one); None where all have it; check `lr_groups`."""
    common = optim.learning_rate or 0.0
    embedding = optim.embedding_lr or (optim.embedding_lr_scale and common * optim.embedding_lr_scale)
    names = set(embedding_names(unwrap_peft(model)) if embedding else ()) - {"original_module", "default"}
    embeddings = names or {"embed_tokens", "lm_head"}
    plus = adapter.plus_ratio if isinstance(model, PeftModel) else None
    if not (optim.lr_groups or embedding or plus):
        return None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for number, group in enumerate(optim.lr_groups):
        for part in group.modules:
            if not any(part in name for name in trained):
                hint = f"Names look like {', '.join(trained[:3])}."
                raise UserError(f"lr_groups[{number}].modules: no trained weight's name contains '{part}'. {hint}")

    # `lr_groups` win over `embedding_lr`, which wins over LoRA+.
    def lr_rule(name: str, parameter: nn.Parameter) -> float | None:
        for group in optim.lr_groups:
            if any(part in name for part in group.modules):
                return group.lr
        if embedding and any(part in name.split(".") for part in embeddings):
            return embedding
        if plus and "lora_embedding_" in name:
            return adapter.plus_embedding_rate
        return common * plus if plus and ("lora_B" in name or parameter.ndim == 1) else None

    return lr_rule


def split_by_lr(optimizer: Optimizer, model: nn.Module, lr_rule: LrRule) -> None:
    """Split an optimizer's groups by learning rate; the groups with the common rate come first."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    whole: list[dict[str, Any]] = []
    special: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        by_rate: dict[float | None, list[nn.Parameter]] = {None: []}
        for parameter in group["params"]:
            by_rate.setdefault(lr_rule(names[parameter], parameter), []).append(parameter)
        whole.append({**group, "params": by_rate.pop(None)})
        special += [{**group, "params": members, "lr": rate} for rate, members in by_rate.items()]
    optimizer.param_groups[:] = [*whole, *special]


class ConfiguredRates(TrainerCallback):
    """Replaces the learning rates of a checkpoint by those of this run."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._used = [group["lr"] for group in optimizer.param_groups if group["params"]]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        every, schedule = kwargs["optimizer"].param_groups, kwargs["lr_scheduler"]
        rates = self._rates if len(every) == len(self._rates) else self._used  # DeepSpeed drops empty groups
        pairs = list(zip(every, rates, strict=True))
        begins = state.global_step == 0  # the schedule has set its initial rates
        if begins or all(group.get("initial_lr", rate) == rate for group, rate in pairs):
            return
        for group, rate in pairs:
            group["lr"] *= rate / group["initial_lr"] if group["initial_lr"] else 0.0
            group["initial_lr"] = rate
        now = {"base_lrs": [group["initial_lr"] for group in every], "_last_lr": [group["lr"] for group in every]}
        schedule.load_state_dict(schedule.state_dict() | now)
