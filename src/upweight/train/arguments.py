"""Build the TrainingArguments of the loop, and the variables of trackers, from a config or a script's arguments."""

import copy
import math
import os
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from upweight.config import Config
from upweight.config.sections.run import TrackingSection
from upweight.config.sections.training import OptimSection
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.precision import Sharding
from upweight.settings import values_by_path
from upweight.train.distributed.deepspeed import require_deepspeed, zero_config
from upweight.train.distributed.fsdp import fsdp_arguments
from upweight.user_modules import is_path

DEFAULT_SAVE_STEPS = 500  # of transformers
# Optimizers for which transformers has a longer name only.
LONG_OPTIMIZER_NAMES = {name: f"{name}_32bit" for name in ("lion", "paged_lion", "paged_adamw")}
# Keys with the name of an argument that are used elsewhere.
NOT_PASSED_ON = {"deepspeed", "fsdp", "gradient_checkpointing_kwargs", "resume_from_checkpoint"}
NOT_PASSED_ON |= {"optim_args", "lr_scheduler_kwargs"}
TRACKER_VARIABLES = {
    **{f"WANDB_{key.upper()}": f"wandb_{key}" for key in ("project", "entity", "run_id", "mode", "watch", "log_model")},
    "MLFLOW_TRACKING_URI": "mlflow_uri",
    "MLFLOW_EXPERIMENT_NAME": "mlflow_experiment",
    **{f"COMET_{key.upper()}": f"comet_{key}" for key in ("api_key", "workspace", "experiment_key", "mode")},
    "COMET_PROJECT_NAME": "comet_project",
    "COMET_START_ONLINE": "comet_online",
    **{
        f"SWANLAB_{key.upper()}": f"swanlab_{key}" for key in ("api_key", "project", "workspace", "description", "mode")
    },
    **{f"SWANLAB_{key.upper()}": f"swanlab_{key}" for key in ("web_host", "api_host")},
}
# Options of Comet's ExperimentConfig, which transformers does not pass on, by the variable that Comet reads for each.
COMET_VARIABLES = {
    "disabled": "COMET_AUTO_LOG_DISABLE", "parse_args": "COMET_AUTO_LOG_CLI_ARGUMENTS",
    "display_summary_level": "COMET_DISPLAY_SUMMARY_LEVEL", "auto_output_logging": "COMET_AUTO_LOG_OUTPUT_LOGGER",
    "auto_param_logging": "COMET_AUTO_LOG_PARAMETERS", "auto_metric_logging": "COMET_AUTO_LOG_METRICS",
    "auto_metric_step_rate": "COMET_AUTO_LOG_METRIC_STEP_RATE", "offline_directory": "COMET_OFFLINE_DIRECTORY",
    "auto_histogram_epoch_rate": "COMET_AUTO_LOG_HISTOGRAM_EPOCH_RATE",
    "auto_histogram_gradient_logging": "COMET_AUTO_LOG_HISTOGRAM_GRADIENTS",
    "auto_histogram_activation_logging": "COMET_AUTO_LOG_HISTOGRAM_ACTIVATIONS",
    "auto_histogram_tensorboard_logging": "COMET_AUTO_LOG_HISTOGRAM_TENSORBOARD",
    "auto_histogram_weight_logging": "COMET_AUTO_LOG_HISTOGRAM_WEIGHTS",
    "distributed_node_identifier": "COMET_DISTRIBUTED_NODE_IDENTIFIER",
    "name": "COMET_START_EXPERIMENT_NAME", "tags": "COMET_START_EXPERIMENT_TAGS",
}  # fmt: skip


def training_arguments(
    config: Config,
    script_args: TrainingArguments | None = None,
    *,
    steps_per_epoch: int,
    use_cpu: bool,
    dtype: torch.dtype = torch.float32,
    sharding: Sharding = "none",
) -> TrainingArguments:
    """Return the arguments of the loop, from a config or from the `script_args` of a trainer."""
    if script_args is not None:
        return _script_arguments(config, script_args, sharding, dtype)
    optim, run = config.optim, config.run
    total = optim.max_steps or math.ceil(optim.num_epochs * steps_per_epoch)
    metric, more_is_better = _best_metric(config)
    tf32 = is_torch_tf32_available() if config.model.tf32 == "auto" else config.model.tf32
    arguments = _passed_on(config)
    arguments |= dict(
        per_device_eval_batch_size=optim.eval_batch_size or step_size(config),
        num_train_epochs=optim.num_epochs,
        max_steps=optim.max_steps or -1,
        **_optimizer_arguments(optim, more_is_better=more_is_better),
        warmup_steps=_warmup_steps(config, total),
        fp16=dtype == torch.float16,  # brings loss scaling
        tf32=tf32 if torch.cuda.is_available() else None,
        use_cpu=use_cpu,
        restore_callback_states_from_checkpoint=True,
        dataloader_prefetch_factor=config.data.prefetch if config.data.workers else None,
        logging_steps=run.logging_steps or min(max(total // 200, 1), 10),
        logging_first_step=True,
        disable_tqdm=True,
        log_level_replica="passive",  # as quiet as rank 0; by default other ranks show warnings
        metric_for_best_model=metric,
        greater_is_better=more_is_better,
        **_save_and_eval_schedule(config, steps_per_epoch),
        push_to_hub=run.hub_model_id is not None,
        hub_strategy=run.hub_strategy or "end",
        **_fixed_arguments(config) | _sharding_arguments(config, sharding, dtype),
        **tracking_arguments(config.tracking),
    )
    try:
        return TrainingArguments(**arguments)
    except ValueError as error:
        raise UserError(f"transformers does not take these settings together: {error}") from error


def _optimizer_arguments(optim: OptimSection, *, more_is_better: bool | None) -> dict[str, Any]:
    """Return optimizer and schedule; those that `user_code.py` builds, the user's and Muon, have none."""
    arguments: dict[str, Any] = {"lr_scheduler_type": "constant"}
    if not is_path(optim.optimizer) and optim.optimizer != "muon":
        extra = optim.optimizer_args
        arguments["optim"] = LONG_OPTIMIZER_NAMES.get(optim.optimizer, optim.optimizer)
        is_mapping = isinstance(extra, dict)
        arguments["optim_args"] = ",".join(f"{key}={value}" for key, value in extra.items()) if is_mapping else extra
    if not is_path(optim.scheduler):
        plateau = {"mode": "max" if more_is_better else "min"} if optim.scheduler == "reduce_lr_on_plateau" else {}
        arguments |= {"lr_scheduler_type": optim.scheduler, "lr_scheduler_kwargs": plateau | optim.scheduler_args}
    return arguments


def _passed_on(config: Config) -> dict[str, Any]:
    """Return the keys that are named like an argument of transformers."""
    names = {field.name for field in fields(TrainingArguments)} - NOT_PASSED_ON
    sections = (config.run, config.optim, config.sharding, config.data)
    values = {path: value for section in sections for path, value in values_by_path(section).items()}
    return {path: value for path, value in values.items() if path in names and value is not None}


def step_size(config: Config) -> int:
    """Return the samples of an optimizer step on each rank."""
    return (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1)


def _fixed_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments that every run sets: the Trainer sees one batch per step, which `StepRunner` splits."""
    return {
        "per_device_train_batch_size": step_size(config),
        "data_seed": config.order_seed,
        "gradient_accumulation_steps": 1,
        "learning_rate": config.optim.learning_rate or 0.0,
        "bf16": False,  # weights are computed in bfloat16 as they are; autocast would cast them at every use
        "gradient_checkpointing": False,  # the engine checkpoints
        "use_liger_kernel": False,
        "neftune_noise_alpha": None,  # the hook of transformers takes a packed row for one sequence
        "remove_unused_columns": False,
        "ignore_data_skip": config.method.online,  # rollouts restore their position
        "logging_nan_inf_filter": False,
        "ddp_find_unused_parameters": False,
        "save_total_limit": None,  # the Trainer deletes old checkpoints before the new one is complete
    }


def _script_arguments(
    config: Config, script_args: TrainingArguments, sharding: Sharding, dtype: torch.dtype
) -> TrainingArguments:
    """Return a copy of a script's arguments with those that the loop needs."""
    arguments = copy.copy(script_args)
    for name, value in _fixed_arguments(config).items():
        setattr(arguments, name, value)
    if config.sharding.fsdp and sharding == "none":
        arguments.fsdp = arguments.fsdp_plugin_args = None
    if sharding != "deepspeed":
        arguments.deepspeed = None
        return arguments
    for name, value in _sharding_arguments(config, sharding, dtype).items():
        setattr(arguments, name, value)
    # transformers reads DeepSpeed's config in __init__, which must come after the model is loaded.
    return TrainingArguments(**{f.name: getattr(arguments, f.name) for f in fields(TrainingArguments) if f.init})


def refuse_dispatch(arguments: TrainingArguments | None) -> None:
    """Raise a UserError if a script asks that one rank reads a stream for all."""
    accelerate: Any = arguments and arguments.accelerator_config
    if accelerate and accelerate.dispatch_batches:
        problem = "Iterable datasets require `dispatch_batches=False`: every rank reads the stream"
        raise UserError(f"accelerator_config: {problem}.")


def set_for_feed(arguments: TrainingArguments) -> None:
    """Set what a loop needs whose rows come from a feed, which restores its position and reads ahead by itself."""
    arguments.ignore_data_skip = True
    accelerate: Any = arguments.accelerator_config
    accelerate.dispatch_batches = False
    if arguments.dataloader_num_workers:
        warn_once("dataloader_num_workers: no effect on a stream or mixture; 'dataset_num_proc' processes encode it")
    arguments.dataloader_num_workers, arguments.dataloader_prefetch_factor = 0, None


def _warmup_steps(config: Config, total: int) -> int:
    """Return the steps of linear warm-up; by default 3% of all, at most 100, and none where there is one step."""
    optim = config.optim
    steps = min(math.ceil(0.03 * total), 100, total - 1)  # the first step of a warm-up has a rate of 0
    if optim.warmup_steps is not None:
        steps = math.ceil(optim.warmup_steps * total) if optim.warmup_steps < 1 else int(optim.warmup_steps)
    elif optim.warmup_ratio is not None:
        steps = math.ceil(optim.warmup_ratio * total)
    # transformers' polynomial schedule divides by the steps after warm-up.
    return steps - 1 if optim.scheduler == "polynomial" and steps == total else steps


def _best_metric(config: Config) -> tuple[str | None, bool | None]:
    """Return the metric that compares evaluations, where a setting needs it, and whether greater is better."""
    run = config.run
    compared = run.load_best or run.patience is not None or run.save_strategy == "best"
    compared = compared or config.optim.scheduler == "reduce_lr_on_plateau"
    default = "reward" if config.method.online and not config.method.evaluates_loss else "loss"
    metric = run.best_metric or (default if compared else None)
    by_name = None if metric is None else not metric.endswith("loss")
    return metric, by_name if run.greater_is_better is None else run.greater_is_better


def _save_and_eval_schedule(config: Config, steps_per_epoch: int) -> dict[str, Any]:
    """Return when to save and evaluate; with `load_best`, save steps are a multiple of the evaluation steps."""
    run = config.run
    saving = _strategy_and_steps("save", run.save_strategy, run.save_steps, run.saves_per_epoch, steps_per_epoch)
    if not (config.data.test_datasets or config.data.val_set_size):
        return saving | {"eval_strategy": "no"}
    evaluating = _strategy_and_steps("eval", run.eval_strategy, run.eval_steps, run.evals_per_epoch, steps_per_epoch)
    by_steps = saving["save_strategy"] == evaluating["eval_strategy"] == "steps"
    if run.load_best and by_steps and not (run.save_steps and run.eval_steps):
        saved = saving.get("save_steps", DEFAULT_SAVE_STEPS)
        every = evaluating.setdefault("eval_steps", saved)
        saving["save_steps"] = max(saved - saved % every, every) if every >= 1 and saved >= 1 else every
    # Progress of an online run, and of one that answers held-out prompts, shows against the model before training.
    shows_progress = config.method.online or run.answered_prompts > 0
    on_start = run.eval_on_start or (shows_progress and "eval_on_start" not in config.set_keys)
    return {**saving, **evaluating, "eval_on_start": on_start}


def _strategy_and_steps(
    what: str, strategy: str | None, steps: float | None, per_epoch: int | None, steps_per_epoch: int
) -> dict[str, Any]:
    """Return the strategy and steps of saving or evaluating; below 1, `steps` are a share of all steps."""
    if per_epoch:
        return {f"{what}_strategy": "steps", f"{what}_steps": max(steps_per_epoch // per_epoch, 1)}
    if steps:
        return {f"{what}_strategy": strategy or "steps", f"{what}_steps": steps if steps < 1 else int(steps)}
    return {f"{what}_strategy": strategy or "epoch"}


def _sharding_arguments(config: Config, sharding: Sharding, dtype: torch.dtype) -> dict[str, Any]:
    if sharding == "deepspeed":
        require_deepspeed()
        zero = zero_config(config.sharding.deepspeed or {}, config.folder, dtype)
        return {"deepspeed": zero, "bf16": dtype == torch.bfloat16}
    return fsdp_arguments(config.sharding) if sharding == "fsdp" else {}


def enabled_trackers(tracking: TrackingSection) -> list[str]:
    """Return the trackers that the config turns on."""
    wandb = tracking.wandb_project is not None if tracking.wandb is None else tracking.wandb
    wandb = wandb and tracking.wandb_mode != "disabled"  # which needs no package either
    others = [
        tracker for tracker in ("mlflow", "tensorboard", "trackio", "comet", "swanlab") if getattr(tracking, tracker)
    ]
    # Comet's name in transformers is that of its package.
    others = ["comet_ml" if tracker == "comet" else tracker for tracker in others]
    return ["wandb", *others] if wandb else others


def tracking_arguments(tracking: TrackingSection) -> dict[str, Any]:
    """Return the TrainingArguments of the trackers."""
    enabled = enabled_trackers(tracking)
    names = {"wandb": tracking.wandb_name, "mlflow": tracking.mlflow_run, "trackio": tracking.trackio_run}
    names |= {"swanlab": tracking.swanlab_experiment, "comet_ml": tracking.comet_options.get("name")}
    arguments: dict[str, Any] = {
        "report_to": enabled or "none",
        "run_name": next((names[tracker] for tracker in enabled if names.get(tracker)), None),
    }
    if "trackio" in enabled:
        options = {"project": tracking.trackio_project, "trackio_space_id": tracking.trackio_space}
        arguments |= {name: value for name, value in options.items() if value is not None}
    return arguments


def set_variables(tracking: TrackingSection) -> None:
    """Set the environment variables that the trackers read."""
    for variable, field in TRACKER_VARIABLES.items():
        if (value := getattr(tracking, field)) is not None:
            os.environ[variable] = str(value)
    for option, value in tracking.comet_options.items():
        variable = COMET_VARIABLES.get(option, f"COMET_AUTO_{option.upper()}")  # log_code: COMET_AUTO_LOG_CODE
        os.environ[variable] = str(value)
    if tracking.mlflow_artifacts:
        os.environ["HF_MLFLOW_LOG_ARTIFACTS"] = "1"
