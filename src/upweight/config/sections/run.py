"""Keys about a run: output folder, checkpoints, evaluation, logging, early stopping and trackers."""

import os
from typing import Literal

from pydantic import field_validator

from upweight.settings import PositiveInt, Section, setting

EvalStrategy = Literal["no", "steps", "epoch"]
SaveStrategy = Literal["no", "steps", "epoch", "best"]
HubStrategy = Literal["end", "every_save", "checkpoint", "all_checkpoints"]
WandbWatch = Literal["gradients", "all", "parameters", "false"]
WandbUpload = Literal["checkpoint", "end", "false"]
CometMode = Literal["get_or_create", "get", "create"]
CometOption = Literal[
    "disabled", "log_code", "log_graph", "parse_args", "display_summary_level", "log_git_metadata", "log_git_patch",
    "log_env_details", "log_env_gpu", "log_env_host", "log_env_cpu", "log_env_network", "log_env_disk",
    "auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_metric_step_rate",
    "auto_histogram_epoch_rate", "auto_histogram_gradient_logging", "auto_histogram_activation_logging",
    "auto_histogram_tensorboard_logging", "auto_histogram_weight_logging", "offline_directory",
    "distributed_node_identifier", "name", "tags",
]  # fmt: skip
SwanlabMode = Literal["cloud", "local", "offline", "disabled"]
UNNAMED_SAMPLES = 3  # prompts that `generate_samples` answers


class RunSection(Section):
    """Output, checkpoints, evaluation, logging."""

    output_dir: str = setting("output_dir", "./model-out", "Output folder of the run.")
    logging_steps: PositiveInt | None = setting(
        "logging_steps", None, "Steps between logs. When left out, the length of the run decides."
    )
    save_steps: float | None = setting(
        "save_steps", None, "Steps between checkpoints; a value below 1 is a share of all steps.", gt=0
    )
    saves_per_epoch: PositiveInt | None = setting("saves_per_epoch", None, "Checkpoints in each epoch.")
    save_strategy: SaveStrategy | None = setting(
        "save_strategy", None, "When to save. When left out: as the other keys say, or after each epoch."
    )
    save_total_limit: PositiveInt | None = setting("save_total_limit", 4, "Number of checkpoints that are kept.")
    save_only_model: bool = setting(
        "save_only_model", False, "Save only the weights; such checkpoints cannot be resumed exactly."
    )
    eval_steps: float | None = setting(
        "eval_steps", None, "Steps between evaluations; a value below 1 is a share of all steps.", gt=0
    )
    evals_per_epoch: PositiveInt | None = setting("evals_per_epoch", None, "Evaluations in each epoch.")
    eval_strategy: EvalStrategy | None = setting(
        "eval_strategy", None, "When to evaluate. When left out, the other keys decide."
    )
    eval_on_start: bool = setting("eval_on_start", False, "Evaluate once before the first step.")
    eval_samples: int = setting(
        "eval_samples",
        0,
        "Held-out prompts that an offline run answers before its first and after its last step.",
        ge=0,
    )
    generate_samples: bool = setting(
        "generate_samples",
        False,
        f"Answer held-out prompts at every evaluation too; {UNNAMED_SAMPLES} of them unless `eval_samples` is set.",
    )
    answer_tokens: PositiveInt = setting(
        "generation_max_new_tokens", 128, "Most tokens of an answer of `eval_samples` or `generate_samples`."
    )
    answer_temperature: float = setting(
        "generation_temperature", 0.0, "Temperature of these answers; 0 is greedy decoding.", ge=0
    )
    answer_top_p: float = setting("generation_top_p", 1.0, "Top-p of these answers.", gt=0, le=1)
    answer_top_k: int = setting("generation_top_k", 0, "Top-k of these answers; 0 for all tokens.", ge=0)
    best_metric: str | None = setting("metric_for_best_model", None, "Metric by which the best checkpoint is chosen.")
    greater_is_better: bool | None = setting("greater_is_better", None, "Whether a larger best metric is better.")
    load_best: bool = setting("load_best_model_at_end", False, "Load the best checkpoint as the final model.")
    patience: PositiveInt | None = setting(
        "early_stopping_patience", None, "Evaluations without improvement after which the run stops."
    )
    resume_from: str | None = setting("resume_from_checkpoint", None, "Checkpoint folder to resume from.")
    auto_resume: bool = setting(
        "auto_resume_from_checkpoints", False, "Resume from the last complete checkpoint, if there is one."
    )
    allow_changed_data: bool = setting("allow_changed_data", False, "Resume although the training data has changed.")
    hub_model_id: str | None = setting("hub_model_id", None, "Repository on the hub to push the result to.")
    hub_strategy: HubStrategy | None = setting("hub_strategy", None, "When to push.")
    hub_revision: str | None = setting("hub_revision", None, "Branch on the hub to push to.")
    hub_timeout: PositiveInt = setting("hub_timeout", 120, "Seconds without an answer that end a request to the hub.")
    hub_private: bool = setting("hub_private_repo", True, "Whether a repository that the push creates is private.")

    @property
    def answered_prompts(self) -> int:
        """Return how many held-out prompts an offline run answers."""
        return self.eval_samples or (UNNAMED_SAMPLES if self.generate_samples else 0)

    @field_validator("output_dir")
    @classmethod
    def _in_the_home_folder(cls, folder: str) -> str:
        """Expand `~` to the home folder, as transformers does."""
        return os.path.expanduser(folder)


class TrackingSection(Section):
    """Trackers that receive metrics besides `metrics.jsonl`; all are off by default."""

    wandb: bool | None = setting("use_wandb", None, "Log to Weights & Biases; on when `wandb_project` is set.")
    wandb_project: str | None = setting("wandb_project", None, "Weights & Biases project.")
    wandb_entity: str | None = setting("wandb_entity", None, "Weights & Biases user or team.")
    wandb_name: str | None = setting("wandb_name", None, "Weights & Biases run name.")
    wandb_run_id: str | None = setting("wandb_run_id", None, "Weights & Biases run to continue.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = setting("wandb_mode", None, "Weights & Biases mode.")
    wandb_watch: WandbWatch | None = setting("wandb_watch", None, "What Weights & Biases watches.")
    wandb_log_model: WandbUpload | None = setting("wandb_log_model", None, "When Weights & Biases gets the model.")
    mlflow: bool = setting("use_mlflow", False, "Log to MLflow.")
    mlflow_uri: str | None = setting("mlflow_tracking_uri", None, "MLflow server.")
    mlflow_experiment: str | None = setting("mlflow_experiment_name", None, "MLflow experiment.")
    mlflow_run: str | None = setting("mlflow_run_name", None, "MLflow run name.")
    mlflow_artifacts: bool = setting("hf_mlflow_log_artifacts", False, "Upload checkpoints to MLflow.")
    tensorboard: bool = setting("use_tensorboard", False, "Write TensorBoard files.")
    trackio: bool = setting("use_trackio", False, "Log to Trackio.")
    trackio_project: str | None = setting("trackio_project_name", None, "Trackio project.")
    trackio_run: str | None = setting("trackio_run_name", None, "Trackio run name.")
    trackio_space: str | None = setting("trackio_space_id", None, "Space that shows the Trackio board.")
    comet: bool = setting("use_comet", False, "Log to Comet.")
    comet_api_key: str | None = setting(
        "comet_api_key", None, "Comet key; instead `COMET_API_KEY` or Comet's login can be used."
    )
    comet_workspace: str | None = setting("comet_workspace", None, "Comet workspace.")
    comet_project: str | None = setting("comet_project_name", None, "Comet project.")
    comet_experiment_key: str | None = setting("comet_experiment_key", None, "Comet experiment to continue.")
    comet_mode: CometMode | None = setting("comet_mode", None, "Whether Comet begins an experiment or continues one.")
    comet_online: bool | None = setting("comet_online", None, "Send to Comet, or keep an archive for `comet upload`.")
    comet_options: dict[CometOption, bool | int | str] = setting(
        "comet_experiment_config", {}, "Options of Comet's `ExperimentConfig`: `log_code: false`."
    )
    swanlab: bool = setting("use_swanlab", False, "Log to SwanLab; transformers needs `swanlab<0.8`.")
    swanlab_api_key: str | None = setting("swanlab_api_key", None, "SwanLab key; instead SwanLab's login can be used.")
    swanlab_project: str | None = setting("swanlab_project", None, "SwanLab project.")
    swanlab_workspace: str | None = setting("swanlab_workspace", None, "SwanLab user or team.")
    swanlab_experiment: str | None = setting("swanlab_experiment_name", None, "SwanLab experiment name.")
    swanlab_description: str | None = setting("swanlab_description", None, "SwanLab description of the experiment.")
    swanlab_mode: SwanlabMode | None = setting("swanlab_mode", None, "SwanLab mode.")
    swanlab_web_host: str | None = setting("swanlab_web_host", None, "Address of the pages of your own SwanLab server.")
    swanlab_api_host: str | None = setting("swanlab_api_host", None, "Address of the API of your own SwanLab server.")
