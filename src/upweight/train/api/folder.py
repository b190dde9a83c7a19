"""What the run of a script leaves in its folder, for `upweight report`, `watch` and `doctor`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback

from upweight.runs.record import about, recorded, refuse_busy
from upweight.train.api.configs import MethodArguments
from upweight.train.api.grpo_config import RolloutArguments
from upweight.train.callbacks import HealthCallback
from upweight.train.online.completions import cut_completions
from upweight.train.run_folder import MetricsFile, cut_metrics, put_section
from upweight.train.trainer import MethodTrainer


@contextmanager
def recording(trainer: MethodTrainer, args: MethodArguments) -> Iterator[None]:
    """Keep metrics, verdicts and the record of one training by a script's trainer, and write its report."""
    folder = Path(args.output_dir or ".")
    if trainer.is_world_process_zero():  # which alone writes the record, so that the others would find its own
        refuse_busy(folder)
    callbacks = [_Fresh(folder), MetricsFile(folder), HealthCallback(folder)]
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        record = {**about(trainer), "settings": _settings(trainer, args)}
        with recorded(folder, record, writes=trainer.is_world_process_zero()):
            yield
    finally:
        for callback in callbacks:
            trainer.remove_callback(callback)


def _settings(trainer: MethodTrainer, args: MethodArguments) -> dict[str, Any]:
    """The script's arguments in YAML's words."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    by_method = {"sft": {}, "orm": {"reward_model": True}, "prm": {"process_reward_model": True}}
    content: dict[str, Any] = {
        "base_model": getattr(model.config, "name_or_path", "") or type(model).__name__,
        **by_method.get(trainer.method.name, {"rl": trainer.method.name}),
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "learning_rate": trainer.args.learning_rate,
        "seed": args.seed,
    }
    if isinstance(model, PeftModel):
        config: Any = model.active_peft_config
        content |= {"adapter": str(config.peft_type.value).lower(), "lora_r": getattr(config, "r", None)}
    put_section(content, trainer.method)
    if isinstance(args, RolloutArguments) and trainer.rollouts is not None:
        put_section(content, args.rollout())
        content["trl"]["reward_funcs"] = list(trainer.rollouts.producer.names)
    return content


class _Fresh(TrainerCallback):
    """Cuts the folder back to the step at which a training begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            cut_metrics(self.folder, state.global_step or -1)
            cut_completions(self.folder, state.global_step or -1)
