"""A config's sections, or what a script says, as the TrainingArguments of this loop."""

import copy
import math
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from upweight.config import Config
from upweight.errors import UserError
from upweight.models.precision import Sharding
from upweight.train.distributed.deepspeed import zero_arguments, zero_config
from upweight.train.distributed.fsdp import fsdp_arguments
from upweight.train.recording.trackers import tracking_arguments

DEFAULT_SAVE_STEPS = 500  # transformers' own, where nothing is said
# Optimizers that transformers knows under longer names alone.
LONG_OPTIMIZER_NAMES = {name: f"{name}_32bit" for name in ("lion", "paged_lion", "paged_adamw")}


def training_arguments(
    config: Config,
    given: TrainingArguments | None = None,
    *,
    steps_per_epoch: int,
    use_cpu: bool,
    dtype: torch.dtype = torch.float32,
    sharding: Sharding = "none",
) -> TrainingArguments:
    """The arguments of the loop, from a config or from those that a script `given` its trainer."""
    if given is not None:
        return _script_arguments(config, given, sharding, dtype)
    optim, run = config.optim, config.run
    total = optim.max_steps or math.ceil(optim.num_epochs * steps_per_epoch)
    arguments: dict[str, Any] = dict(
        output_dir=run.output_dir,
        per_device_eval_batch_size=optim.eval_batch_size or _batch(config),
        num_train_epochs=optim.num_epochs,
        max_steps=optim.max_steps or -1,
        optim=LONG_OPTIMIZER_NAMES.get(optim.optimizer, optim.optimizer),
        optim_args=_optimizer_args(config),
        lr_scheduler_type=optim.scheduler,
        lr_scheduler_kwargs=_scheduler_args(config),
        warmup_steps=_warmup(config, total),
        weight_decay=optim.weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_epsilon=optim.adam_epsilon,
        max_grad_norm=optim.max_grad_norm,
        seed=optim.seed,
        full_determinism=optim.full_determinism,
        data_seed=optim.seed,
        fp16=dtype == torch.float16,  # brings loss scaling
        tf32=_tf32(config),
        use_cpu=use_cpu,
        restore_callback_states_from_checkpoint=True,
        dataloader_num_workers=config.data.workers,
        dataloader_prefetch_factor=config.data.prefetch if config.data.workers else None,
        dataloader_drop_last=config.data.drop_last,
        logging_steps=run.logging_steps or min(max(total // 200, 1), 10),
        logging_first_step=True,
        disable_tqdm=True,
        torch_empty_cache_steps=optim.empty_cache_steps,
        **_save_and_eval_schedule(config, steps_per_epoch),
        **_hub_arguments(config),
        **_fixed_arguments(config) | _sharding_arguments(config, sharding, dtype),
        **tracking_arguments(config.tracking),
    )
    try:
        return TrainingArguments(**arguments)
    except ValueError as error:
        raise UserError(f"transformers does not take these settings together: {error}") from error


def _batch(config: Config) -> int:
    return (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1)


def _fixed_arguments(config: Config) -> dict[str, Any]:
    """What has to be so, whoever asks for a run: a step is one batch, which the step runner cuts into forwards."""
    return {
        "per_device_train_batch_size": _batch(config),
        "gradient_accumulation_steps": 1,
        "learning_rate": config.optim.learning_rate or 0.0,
        "bf16": False,  # weights are computed in bfloat16 as they are; autocast would cast them at every use
        "gradient_checkpointing": False,  # the engine's own
        "use_liger_kernel": False,
        "neftune_noise_alpha": None,  # the stock hook would take a packed row for one sequence
        "remove_unused_columns": False,
        "ignore_data_skip": config.method.online,  # rollouts know themselves where they were
        "logging_nan_inf_filter": False,
        "ddp_find_unused_parameters": False,
        "save_total_limit": None,  # the Trainer drops old checkpoints before the new one is whole
    }


def _script_arguments(
    config: Config, given: TrainingArguments, sharding: Sharding, dtype: torch.dtype
) -> TrainingArguments:
    """A script's arguments as the loop needs them; its own stay as they are."""
    seen = copy.copy(given)
    for name, value in _fixed_arguments(config).items():
        setattr(seen, name, value)
    if config.sharding.fsdp and sharding == "none":
        seen.fsdp = seen.fsdp_plugin_args = None
    if sharding != "deepspeed":
        seen.deepspeed = None
        return seen
    assert config.sharding.deepspeed is not None
    zero = zero_arguments(zero_config(config.sharding.deepspeed, config.folder, dtype), dtype)
    for name, value in zero.items():
        setattr(seen, name, value)
    # Only making them anew has transformers read DeepSpeed's config, which was too early before the model was there.
    return TrainingArguments(**{one.name: getattr(seen, one.name) for one in fields(TrainingArguments) if one.init})


def _optimizer_args(config: Config) -> str | None:
    given = config.optim.optimizer_args
    return ",".join(f"{key}={value}" for key, value in given.items()) if isinstance(given, dict) else given


def _warmup(config: Config, total: int) -> int:
    """Steps of linear warm-up; without a word, 3% of all and at most 100."""
    optim = config.optim
    steps = min(math.ceil(0.03 * total), 100)
    if optim.warmup_steps is not None:
        steps = math.ceil(optim.warmup_steps * total) if optim.warmup_steps < 1 else int(optim.warmup_steps)
    elif optim.warmup_ratio is not None:
        steps = math.ceil(optim.warmup_ratio * total)
    # transformers' polynomial divides by the steps that are left.
    return steps - 1 if optim.scheduler == "polynomial" and steps == total else steps


def _scheduler_args(config: Config) -> dict[str, Any]:
    """A plateau is one of the metric that checkpoints are compared by, whichever way that is better."""
    optim = config.optim
    if optim.scheduler != "reduce_lr_on_plateau":
        return optim.scheduler_args
    return {"mode": "max" if _comparison(config)[1] else "min", **optim.scheduler_args}


def _tf32(config: Config) -> bool | None:
    if not torch.cuda.is_available():
        return None
    return is_torch_tf32_available() if config.model.tf32 == "auto" else config.model.tf32


def _comparison(config: Config) -> tuple[str | None, bool | None]:
    """The metric that tells better evaluations from worse, where something asks for it, and whether more is better."""
    run = config.run
    compared = run.load_best or run.patience is not None or run.save_strategy == "best"
    compared = compared or config.optim.scheduler == "reduce_lr_on_plateau"
    usual = "reward" if config.method.online else "loss"  # an evaluation of what the policy writes has no loss
    metric = run.best_metric or (usual if compared else None)
    more_is_better = run.greater_is_better
    if more_is_better is None and metric is not None:
        more_is_better = not metric.endswith("loss")
    return metric, more_is_better


def _save_and_eval_schedule(config: Config, steps_per_epoch: int) -> dict[str, Any]:
    """Both, so that the best evaluation can be found again where both go by steps that the data decides."""
    saving, evaluating = _save_schedule(config, steps_per_epoch), _eval_schedule(config, steps_per_epoch)
    every = evaluating.get("eval_steps")
    by_steps = saving["save_strategy"] == evaluating["eval_strategy"] == "steps"
    if config.run.load_best and by_steps and not (config.run.save_steps and config.run.eval_steps):
        saved = saving.get("save_steps", DEFAULT_SAVE_STEPS)
        every = saved if every is None else every
        evaluating["eval_steps"] = every
        saving["save_steps"] = max(saved - saved % every, every) if every >= 1 and saved >= 1 else every
    return saving | evaluating


def _save_schedule(config: Config, steps_per_epoch: int) -> dict[str, Any]:
    """When checkpoints are written; how many are kept is not the Trainer's to say, which drops before it is whole."""
    run = config.run
    metric, more_is_better = _comparison(config)
    return {
        "save_only_model": run.save_only_model,
        "load_best_model_at_end": run.load_best,
        "metric_for_best_model": metric,
        "greater_is_better": more_is_better,
        **_every("save", run.save_strategy, run.save_steps, run.saves_per_epoch, steps_per_epoch),
    }


def _eval_schedule(config: Config, steps_per_epoch: int) -> dict[str, Any]:
    run = config.run
    if not (config.data.test_datasets or config.data.val_set_size):
        return {"eval_strategy": "no"}
    # What an online run has learned shows against what it could do before.
    on_start = run.eval_on_start or (config.method.online and "eval_on_start" not in config.given)
    when = _every("eval", run.eval_strategy, run.eval_steps, run.evals_per_epoch, steps_per_epoch)
    return {"eval_on_start": on_start, **when}


def _every(
    what: str, strategy: str | None, steps: float | None, per_epoch: int | None, steps_per_epoch: int
) -> dict[str, Any]:
    """How often the Trainer does something; below 1, `steps` are a share of all."""
    if per_epoch:
        return {f"{what}_strategy": "steps", f"{what}_steps": max(steps_per_epoch // per_epoch, 1)}
    if steps:
        return {f"{what}_strategy": strategy or "steps", f"{what}_steps": steps if steps < 1 else int(steps)}
    return {f"{what}_strategy": strategy or "epoch"}


def _sharding_arguments(config: Config, sharding: Sharding, dtype: torch.dtype) -> dict[str, Any]:
    options: dict[str, Any] = {
        "ddp_timeout": config.sharding.timeout,
        "ddp_bucket_cap_mb": config.sharding.bucket_mb,
        "ddp_broadcast_buffers": config.sharding.broadcast_buffers,
    }
    if sharding == "deepspeed":
        assert config.sharding.deepspeed is not None
        return options | zero_arguments(zero_config(config.sharding.deepspeed, config.folder, dtype), dtype)
    return options | (fsdp_arguments(config.sharding) if sharding == "fsdp" else {})


def _hub_arguments(config: Config) -> dict[str, Any]:
    run = config.run
    if run.hub_model_id is None:
        return {}
    return {
        "push_to_hub": True,
        "hub_model_id": run.hub_model_id,
        "hub_strategy": run.hub_strategy or "end",
        "hub_revision": run.hub_revision,
        "hub_private_repo": run.hub_private,
    }
