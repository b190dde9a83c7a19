"""Experiment trackers: which ones a run reports to, and the environment variables they read."""

import os
from typing import Any

from upweight.config.sections.run import TrackingSection

VARIABLES = {
    "WANDB_PROJECT": "wandb_project",
    "WANDB_ENTITY": "wandb_entity",
    "WANDB_RUN_ID": "wandb_run_id",
    "WANDB_MODE": "wandb_mode",
    "WANDB_WATCH": "wandb_watch",
    "WANDB_LOG_MODEL": "wandb_log_model",
    "MLFLOW_TRACKING_URI": "mlflow_uri",
    "MLFLOW_EXPERIMENT_NAME": "mlflow_experiment",
}


def enabled_trackers(tracking: TrackingSection) -> list[str]:
    """Return the trackers that the config turns on."""
    enabled = {
        "wandb": tracking.wandb if tracking.wandb is not None else tracking.wandb_project is not None,
        "mlflow": tracking.mlflow,
        "tensorboard": tracking.tensorboard,
        "trackio": tracking.trackio,
    }
    return [tracker for tracker, is_on in enabled.items() if is_on]


def tracking_arguments(tracking: TrackingSection) -> dict[str, Any]:
    """Return the TrainingArguments of the trackers."""
    enabled = enabled_trackers(tracking)
    names = {"wandb": tracking.wandb_name, "mlflow": tracking.mlflow_run, "trackio": tracking.trackio_run}
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
    for variable, field in VARIABLES.items():
        if (value := getattr(tracking, field)) is not None:
            os.environ[variable] = str(value)
    if tracking.mlflow_artifacts:
        os.environ["HF_MLFLOW_LOG_ARTIFACTS"] = "1"
