"""Distillation for Python scripts, under TRL's names: GKD and Distillation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from peft import PeftConfig
from transformers import PreTrainedModel, TrainingArguments

from upweight.config.peers import PACKED
from upweight.config.sections.data import DatasetSpec
from upweight.config.sections.model import ModelSection, TeacherSection
from upweight.methods import Distill
from upweight.methods.base import Method
from upweight.train.api.configs import COUNTS_EXAMPLES, ROWS, ROWS_OF_TEXT, TEMPLATE_PATH, TEXT, text_column
from upweight.train.api.fields import field_for, no_effect, refused, with_help
from upweight.train.api.grpo_config import RolloutArguments
from upweight.train.api.inputs import ScriptDataset, init_arguments, parts_for
from upweight.train.api.trainers import Callbacks, EvalRows, Optimizers, Tokenizer
from upweight.train.objects import Model
from upweight.train.trainer import MethodTrainer

NO_REWARDS = "a teacher is learned from, without rewards, ratios or a reference; remove it"
OF_DIVERGENCE = "the loss is the divergence from the teacher: set `divergence` and `beta`"


@dataclass
class TeacherArguments(RolloutArguments):
    """The arguments that both forms of distillation share."""

    method_class: ClassVar = Distill

    teacher_model_name_or_path: str | None = field_for(TeacherSection, "teacher")
    teacher_model_revision: str | None = field_for(TeacherSection, "revision")
    teacher_model_init_kwargs: dict[str, Any] | None = field_for(TeacherSection, "load_options", default=None)  # noqa: RUF009
    teacher_align: str | None = field_for(TeacherSection, "align")
    divergence: str = field_for(Distill, "divergence", default="jsd")
    loss_top_k: int | None = field_for(Distill, "top_k")
    loss_tail: str = field_for(Distill, "tail")
    ce_coef: float = field_for(Distill, "ce_coef")
    reward_weights: list[float] | None = refused(None, NO_REWARDS)  # noqa: RUF009
    epsilon: float = refused(0.2, NO_REWARDS)
    epsilon_high: float | None = refused(None, NO_REWARDS)
    sync_ref_model: bool = refused(False, NO_REWARDS)
    ref_model_mixup_alpha: float = refused(0.6, NO_REWARDS)
    ref_model_sync_steps: int = refused(512, NO_REWARDS)
    dynamic_sampling_max_rounds: int = refused(0, NO_REWARDS)

    def __post_init__(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        super().__post_init__()


@dataclass
class DistillationConfig(TeacherArguments):
    """Settings of distillation on the student's own samples; `temperature` is that of sampling and of the loss."""

    max_completion_length: int = field_for(Distill, "max_completion_length", default=512)
    beta: float = field_for(Distill, "beta", default=1.0)
    disable_dropout: bool = field_for(ModelSection, "disable_dropout", default=False)

    def method(self) -> Method:
        """Return the method, whose temperature is that of sampling."""
        return super().method().model_copy(update={"temperature": self.temperature})


@dataclass
class GKDConfig(TeacherArguments):
    """Settings of generalised knowledge distillation; `temperature` is that of sampling."""

    lmbda: float = field_for(Distill, "on_policy", default=0.5)
    beta: float = field_for(Distill, "beta")
    seq_kd: bool = field_for(Distill, "seq_kd")
    temperature: float = with_help(0.9, "Sampling temperature.")
    max_new_tokens: int = with_help(128, "Most tokens a completion may have.")
    max_length: int | None = with_help(1024, "Longest sequence in tokens, where nothing is sampled.")
    shuffle_dataset: bool = with_help(False, "Take rows in a new order in each epoch.")
    chat_template_path: str | None = with_help(None, TEMPLATE_PATH)
    dataset_text_field: str = with_help(TEXT, "Column of plain text.")
    completion_only_loss: bool | None = refused(None, "completions are compared, never prompts; remove it")
    assistant_only_loss: bool = no_effect(False, "only the assistant's turns are compared")
    loss_type: str = refused("nll", OF_DIVERGENCE)
    packing: bool = no_effect(False, COUNTS_EXAMPLES)
    packing_strategy: str = no_effect("bfd", PACKED)
    eval_packing: bool | None = no_effect(None, PACKED)
    dataset_kwargs: dict[str, Any] | None = refused(None, ROWS_OF_TEXT)  # noqa: RUF009

    def __post_init__(self) -> None:
        self.max_completion_length = self.max_new_tokens
        super().__post_init__()

    def dataset_row(self, columns: Sequence[str] = ()) -> DatasetSpec:
        """Return the entry for rows; `dataset_text_field` names the column of plain text."""
        return DatasetSpec(path=ROWS, field=text_column(self.dataset_text_field, columns))

    def data_settings(self) -> dict[str, Any]:
        """Return the data settings; an offline run shuffles each epoch, as a Trainer does."""
        known = super().data_settings()
        return known | {"curriculum": False} if self.lmbda == 0 and not self.seq_kd else known


class DistillationTrainer(MethodTrainer):
    """Trains a student on the distribution of a teacher, at tokens that the student samples."""

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, teacher_model: str | PreTrainedModel | None = None,
        args: DistillationConfig | TrainingArguments | None = None, train_dataset: ScriptDataset | None = None,
        eval_dataset: EvalRows = None, processing_class: Tokenizer = None, callbacks: Callbacks = None,
        optimizers: Optimizers = (None, None), quantization_config: Any = None,
        peft_config: PeftConfig | None = None, tools: Any = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(DistillationConfig, **init_arguments(locals())))


class GKDTrainer(MethodTrainer):
    """Trains a student on the distribution of a teacher, at its own tokens, the data's or the teacher's."""

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, teacher_model: str | PreTrainedModel | None = None,
        args: GKDConfig | TrainingArguments | None = None, data_collator: None = None,
        train_dataset: ScriptDataset | None = None, eval_dataset: EvalRows = None, processing_class: Tokenizer = None,
        compute_metrics: None = None, callbacks: Callbacks = None, optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: None = None, peft_config: PeftConfig | None = None,
        formatting_func: Callable[[Any], str] | None = None, quantization_config: Any = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(GKDConfig, **init_arguments(locals())))
