"""TrainingArguments with the settings of each method, under TRL's names."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError
from transformers import TrainingArguments

from upweight.callbacks import CallbackSection
from upweight.config.explain import explain, show
from upweight.config.modernise import asks_for_something
from upweight.config.peers import FUSED_HEAD, PACKED
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.config.sections.run import RunSection
from upweight.config.sections.training import OptimSection, ShardingSection
from upweight.errors import UserError, WrongTypeError
from upweight.log import warn_once
from upweight.methods import DPO, KTO, ORM, ORPO, PRM, SFT, SimPO
from upweight.methods.base import Method
from upweight.methods.users.function import UserFunction
from upweight.settings import Section, keys_of
from upweight.train.api.as_config import checked_config, error_translator
from upweight.train.api.fields import field_for, help_of, no_effect, refused, with_help
from upweight.train.api.other_names import advice
from upweight.train.api.values import read_numbers
from upweight.train.distributed.deepspeed import require_deepspeed
from upweight.train.distributed.ranks import init_single_rank
from upweight.train.machine_checks import report_to_problems

AnySection = TypeVar("AnySection", bound=Section)
BUDGET = "rows are cut by `token_budget`, whatever is computed on them"
ROWS = "train_dataset"  # stands for the path of a script's rows in rules
UNLIMITED = 2**31 - 1  # tokens
LOADING = "Arguments of `from_pretrained`, for a model given by name."
MIX_WEIGHTS = "Weights of the datasets of a `train_dataset` that is a mapping, by their names."
PACKED_EXPERTS = "With a `quantization_config` of 4 bits, quantise the routed experts of a mixture too."
TEMPLATE_PATH = "A file with a chat template, or a tokenizer whose template, end token and missing tokens are taken."
ONLY_ENCODER_DECODER = "only encoder-decoder models read it"
COUNTS_EXAMPLES = f"{PACKED}; `per_device_train_batch_size` counts examples, not packs"

NOTHING_GENERATED = "nothing is generated in an evaluation on pairs; remove it"
TEXT = "text"  # the column of plain text, by default
ROWS_OF_TEXT = "rows are prepared from text, messages or `input_ids` here; remove it"
NO_ENCODER = "models that decode from an encoder are not trained"
REFUSED = {  # arguments of transformers
    "auto_find_batch_size": "a batch is cut into forwards by `token_budget`; remove it",
    "label_smoothing_factor": "is for classifiers; preference losses have `label_smoothing`",
}

FUNCTIONS = ("loss_type", "advantage_estimator")  # arguments that may be functions of the script


def as_function(value: Any) -> Any:
    """Return a function as one that files and pickles can hold, anything else as it is."""
    return UserFunction.of(value) if callable(value) else value


@dataclass
class MethodArguments(TrainingArguments):
    """The arguments that all methods share."""

    method_class: ClassVar[type[Method]]
    too_long: ClassVar[Literal["drop", "truncate"]] = "truncate"

    def __new__(cls, *args: Any, **kwargs: Any) -> "MethodArguments":
        """Raise for unknown arguments with a hint at what to use instead."""
        known = [one.name for one in dataclasses.fields(cls)]
        free = [name for name in known if name not in kwargs]
        unknown = [name for name in kwargs if name not in known]
        problems = [
            f"{cls.__name__} takes no argument '{name}'. {advice(name, free, online=cls.method_class.online)}"
            for name in unknown
        ]
        if problems:
            raise WrongTypeError("\n".join(problems))
        return super().__new__(cls)

    learning_rate: float | None = with_help(None, "Peak learning rate; unset: the method's, higher with LoRA.")  # pyright: ignore[reportIncompatibleVariableOverride]
    max_steps: int | None = with_help(-1, "Optimizer steps; -1 or None: by `num_train_epochs`.")
    warmup_ratio: float | None = with_help(None, "Share of the steps with a rising learning rate, for `warmup_steps`.")
    logging_steps: float = with_help(10, "Log every so many steps.")
    bf16: bool | None = with_help(None, "Compute in bfloat16 with float32 masters; unset: where the device can.")
    model_init_kwargs: dict[str, Any] | None = with_help(None, LOADING)  # noqa: RUF009
    trust_remote_code: bool = field_for(ModelSection, "trust_remote_code")
    max_length: int | None = with_help(1024, "Longest sequence in tokens, prompt included; None: no limit.")
    dataset_num_proc: int | None = field_for(DataSection, "processes")
    dataset_prepared_path: str = field_for(DataSection, "prepared_path")
    image_hosts: list[str] | None = field_for(DataSection, "image_hosts", default=None)  # noqa: RUF009
    streaming_buffer_size: int = field_for(DataSection, "buffer_size")
    mix: str = field_for(DataSection, "mix")
    mix_weights: dict[str, float] | None = with_help(None, MIX_WEIGHTS)  # noqa: RUF009
    mix_schedule: list[dict[str, Any]] | None = field_for(DataSection, "mix_schedule", default=None)  # noqa: RUF009
    curriculum_column: str | None = field_for(DataSection, "curriculum_column")
    token_budget: int | None = field_for(OptimSection, "token_budget")
    layout: Literal["auto", "tree", "padded"] = field_for(ModelSection, "layout")
    memory: Literal["lean", "balanced", "fast"] = field_for(OptimSection, "memory")
    head_chunk_tokens: int | None = field_for(OptimSection, "head_chunk")
    activation_offloading: bool = field_for(OptimSection, "activation_offloading")
    reference_offloading: bool = field_for(OptimSection, "reference_offloading")
    tiled_mlp: bool = field_for(OptimSection, "tiled_mlp")
    allow_changed_data: bool = field_for(RunSection, "allow_changed_data")
    chat_template_timeout: float = field_for(DataSection, "template_timeout")
    ddp_wait_timeout: int = field_for(ShardingSection, "wait_timeout")
    loss_watchdog_threshold: float | None = field_for(CallbackSection, "loss_limit")
    loss_watchdog_patience: int = field_for(CallbackSection, "loss_limit_patience")
    truncation_mode: str = with_help("keep_start", "Which end of a long sequence is kept.")
    disable_dropout: bool = field_for(ModelSection, "disable_dropout", default=True)
    eos_token: str | None = with_help(None, "Token that ends a text or turn; unset: the tokenizer's.")
    pad_token: str | None = with_help(None, "Padding token; tells a saved reward model where a text ends.")
    router_aux_loss_coef: float | None = field_for(OptimSection, "router_aux_loss_coef")
    quantize_moe_experts: bool = with_help(False, PACKED_EXPERTS)
    use_liger_kernel: bool = no_effect(False, FUSED_HEAD)
    padding_free: bool = no_effect(False, PACKED)
    pad_to_multiple_of: int | str | None = no_effect(None, PACKED)
    data_seed: int | None = field_for(DataSection, "order_seed")
    include_num_input_tokens_seen: str | bool = no_effect("no", "`num_tokens` is in every log")

    def __post_init__(self) -> None:
        read_numbers(self)
        for name in FUNCTIONS:
            if (value := getattr(self, name, None)) is not None:
                setattr(self, name, [*map(as_function, value)] if isinstance(value, list) else as_function(value))
        if self.max_steps is None:
            self.max_steps = -1  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.warmup_ratio is not None:
            if self.warmup_steps:
                raise UserError("warmup_ratio: cannot be used with 'warmup_steps'. Keep one.")
            if not 0 <= self.warmup_ratio < 1:
                raise UserError(f"warmup_ratio: a share below 1, not {self.warmup_ratio}. `warmup_steps` counts steps.")
            self.warmup_steps, self.warmup_ratio = self.warmup_ratio, None  # which reads values below 1 as a share
        if self.deepspeed is not None:
            require_deepspeed()
            init_single_rank()
        # transformers would require a GPU for bf16 autocast, which is not used here, and would read DeepSpeed's
        # config now, before the model is loaded.
        bf16, self.bf16 = self.bf16, False
        zero, self.deepspeed = self.deepspeed, None
        if self.report_to is None:
            self.report_to = "none"
        super().__post_init__()
        self.bf16, self.deepspeed = bf16, zero  # pyright: ignore[reportIncompatibleVariableOverride]
        self._refuse_arguments()
        self.include_num_input_tokens_seen = "no"  # transformers would look for the tokens of a padded batch
        checked_config(self)

    def _refuse_arguments(self) -> None:
        """Raise for every argument that this loop would ignore; warn of those that have no effect."""
        problems = []
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value != one.default and asks_for_something(value):
                text = help_of(one)
                if why := text.refused or REFUSED.get(one.name):
                    problems.append(f"{one.name}: {why}.")
                if text.no_effect:
                    warn_once(f"{one.name}: nothing to do: {text.no_effect}")
            is_size = one.name in ("per_device_train_batch_size", "gradient_accumulation_steps")
            if is_size and (not isinstance(value, int) or value < 1):
                problems.append(f"{one.name}: a whole number from 1, not {value!r}.")
        if not isinstance(self.model_init_kwargs, Mapping | None):
            problems.append(f"model_init_kwargs: expected a dict, got {type(self.model_init_kwargs).__name__}.")
        if self.fsdp and (self.fsdp_plugin_args or {}).get("fsdp_version", 2) != 2:
            problems.append("fsdp_config: weights are sharded by FSDP2; leave out 'version'.")
        if self.fsdp and (self.fsdp_plugin_args or {}).get("activation_checkpointing"):
            problems.append("fsdp_config: instead of 'activation_checkpointing', use `gradient_checkpointing=True`.")
        accelerate: Any = self.accelerator_config
        if accelerate.split_batches or "num_steps" in (accelerate.gradient_accumulation_kwargs or {}):
            problems.append("accelerator_config: 'split_batches', 'num_steps': other arguments set the size of a step.")
        if self.truncation_mode != "keep_start":
            problems.append("truncation_mode: only 'keep_start' is there: cutting the beginning loses the prompt.")
        problems.extend(report_to_problems(self.report_to))
        if problems:
            raise UserError("\n".join(problems))

    def method(self) -> Method:
        """Return the method with these settings; None leaves a setting at its default."""
        return self.section(self.method_class)

    def section(self, kind: type[AnySection]) -> AnySection:
        """Return the settings of one section from the arguments that set them."""
        names: dict[str, str] = {}
        values: dict[str, Any] = {}
        keys = {key.path: key for key in keys_of(kind)}
        for one in dataclasses.fields(self):
            setting, value = help_of(one).setting, getattr(self, one.name)
            if setting is not None and value is not None and (key := keys.get(setting.path)) is not None:
                values[key.name], names[key.name] = value, one.name
        try:
            return kind(**values)
        except ValidationError as error:
            problems = [
                f"{show((names[str(path[0])], *path[1:]))}: {reason}" if path else reason.replace("trl.", "")
                for path, reason in explain(error, kind, values)
            ]
            translated = map(error_translator(type(self)), problems)
            raise UserError(f"{type(self).__name__}: {'; '.join(translated)}") from None

    def dataset_row(self, columns: Sequence[str] = ()) -> DatasetSpec:
        """Return the `datasets` entry that reads a script's rows with these columns."""
        return DatasetSpec(path=ROWS)

    def data_settings(self) -> dict[str, Any]:
        """Return the settings of `DataSection` that apply to all rows."""
        strategy = self.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            warn_once(f"train_sampling_strategy: {strategy} has no effect: forwards hold equal tokens")
        return {
            "datasets": [self.dataset_row()],
            "sequence_len": self.max_length or UNLIMITED,
            "too_long": self.too_long,
            "shuffle_merged": False,
            "curriculum": strategy == "sequential",
        }

    def trains_on_prompts(self, columns: Sequence[str], where: str) -> bool:
        """Whether the tokens of prompts are trained on, in rows with these columns."""
        return False


def text_column(name: str, columns: Sequence[str]) -> str | None:
    """Return the column of plain text; None where it is only the default, and rows have what is read instead of it."""
    has_other = {"messages", "conversations", "input_ids"} & {*columns} or {"prompt", "completion"} <= {*columns}
    return None if name == TEXT and has_other else name


@dataclass
class SFTConfig(MethodArguments):
    """Settings of supervised fine-tuning."""

    method_class: ClassVar = SFT

    loss_type: str = field_for(SFT, "loss_type")  # or a function
    method_args: dict[str, Any] | None = field_for(SFT, "method_args", default=None)  # noqa: RUF009
    disable_dropout: bool = field_for(ModelSection, "disable_dropout", default=False)
    completion_only_loss: bool | None = with_help(None, "Train on completions only; unset: where rows have prompts.")
    assistant_only_loss: bool = with_help(False, "Train on the assistant's turns only, where rows have messages.")
    chat_template_path: str | None = with_help(None, TEMPLATE_PATH)
    dataset_text_field: str = with_help(TEXT, "Column of plain text.")
    shuffle_dataset: bool = with_help(False, "Shuffle the rows before training, besides each epoch's order.")
    packing: bool = no_effect(False, COUNTS_EXAMPLES)
    packing_strategy: str = no_effect("bfd", PACKED)
    eval_packing: bool | None = no_effect(None, PACKED)
    dataset_kwargs: dict[str, Any] | None = refused(None, ROWS_OF_TEXT)  # noqa: RUF009

    def dataset_row(self, columns: Sequence[str] = ()) -> DatasetSpec:
        """Return the entry for SFT rows; `dataset_text_field` names the text column, masks of token ids are used."""
        roles = ["assistant"] if self.assistant_only_loss and "input_ids" not in columns else None
        return DatasetSpec(path=ROWS, field=text_column(self.dataset_text_field, columns), roles_to_train=roles)

    def data_settings(self) -> dict[str, Any]:
        """Return the settings, with shuffling before training beside the order of each epoch."""
        return super().data_settings() | {"shuffle_merged": self.shuffle_dataset}

    def trains_on_prompts(self, columns: Sequence[str], where: str) -> bool:
        """By default, prompts of prompt-completion rows are not trained on, conversations and token ids are."""
        present = set(columns)
        tokenised = "input_ids" in present
        completions = {"completion_mask", "labels"} & present if tokenised else {"prompt", "completion"} <= present
        turns = "assistant_masks" in present if tokenised else completions or {"messages", "conversations"} & present
        if self.assistant_only_loss and not turns:
            needed = "messages, as 'messages' or 'prompt' and 'completion', or token ids with 'assistant_masks'"
            raise UserError(f"assistant_only_loss: the rows of {where} need {needed}.")
        if self.completion_only_loss and not completions:
            needed = "the columns 'prompt' and 'completion', or token ids with 'completion_mask'"
            remedy = " For messages, set assistant_only_loss=True in its place." if turns else ""
            raise UserError(f"completion_only_loss: the rows of {where} need {needed}.{remedy}")
        if tokenised:
            return not self.completion_only_loss
        return self.completion_only_loss is False if completions else not self.assistant_only_loss


@dataclass
class ReferenceArguments(MethodArguments):
    """The arguments that methods with a reference share."""

    beta: float = field_for(DPO, "beta")
    precompute_ref_log_probs: bool = field_for(DPO, "precompute_ref_log_probs")
    sync_ref_model: bool = field_for(DPO, "sync_ref_model")
    ref_model_mixup_alpha: float = field_for(DPO, "ref_model_mixup_alpha")
    ref_model_sync_steps: int = field_for(DPO, "ref_model_sync_steps")
    precompute_ref_batch_size: int | None = no_effect(None, BUDGET)


@dataclass
class DPOConfig(ReferenceArguments):
    """Settings of DPO and its losses."""

    method_class: ClassVar = DPO

    loss_type: str | list[str] = field_for(DPO, "loss_type")  # noqa: RUF009
    method_args: dict[str, Any] | None = field_for(DPO, "method_args", default=None)  # noqa: RUF009
    loss_weights: list[float] | None = field_for(DPO, "loss_weights")  # noqa: RUF009
    label_smoothing: float = field_for(DPO, "label_smoothing")
    ld_alpha: float | None = field_for(DPO, "ld_alpha")
    f_divergence_type: str = field_for(DPO, "divergence")
    f_alpha_divergence_coef: float = field_for(DPO, "divergence_alpha")
    use_weighting: bool = field_for(DPO, "use_weighting")
    discopop_tau: float = field_for(DPO, "discopop_tau")


@dataclass
class KTOConfig(ReferenceArguments):
    """Settings of KTO."""

    method_class: ClassVar = KTO

    loss_type: str = field_for(KTO, "loss_type")  # or a function
    method_args: dict[str, Any] | None = field_for(KTO, "method_args", default=None)  # noqa: RUF009
    desirable_weight: float = field_for(KTO, "desirable_weight")
    undesirable_weight: float = field_for(KTO, "undesirable_weight")


@dataclass
class ORPOConfig(MethodArguments):
    """Settings of ORPO."""

    method_class: ClassVar = ORPO

    beta: float = field_for(ORPO, "alpha")
    nll_on_prompt: bool = field_for(ORPO, "likelihood_of_prompt")
    max_completion_length: int | None = no_effect(None, ONLY_ENCODER_DECODER)
    is_encoder_decoder: bool | None = refused(None, NO_ENCODER)
    generate_during_eval: bool = refused(False, NOTHING_GENERATED)
    padding_value: int | None = no_effect(None, PACKED)


@dataclass
class CPOConfig(MethodArguments):
    """Settings of CPO, and of SimPO with `loss_type="simpo", cpo_alpha=0`."""

    method_class: ClassVar = SimPO

    beta: float = field_for(SimPO, "beta")
    loss_type: str = field_for(SimPO, "loss_type", default="sigmoid")
    cpo_alpha: float = field_for(SimPO, "nll_weight")
    simpo_gamma: float = field_for(SimPO, "gamma")
    label_smoothing: float = field_for(SimPO, "label_smoothing")
    alpha: float = field_for(SimPO, "alpha")
    max_completion_length: int | None = no_effect(None, ONLY_ENCODER_DECODER)
    is_encoder_decoder: bool | None = refused(None, NO_ENCODER)
    generate_during_eval: bool = refused(False, NOTHING_GENERATED)

    def __post_init__(self) -> None:
        if self.loss_type == "alphapo":  # AlphaPO as published
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        super().__post_init__()


@dataclass
class RewardConfig(MethodArguments):
    """Settings of outcome reward models."""

    method_class: ClassVar = ORM
    too_long: ClassVar[Literal["drop", "truncate"]] = "drop"

    chat_template_path: str | None = with_help(None, TEMPLATE_PATH)
    center_rewards_coefficient: float | None = field_for(ORM, "center_rewards_coefficient")


@dataclass
class PRMConfig(MethodArguments):
    """Settings of process reward models."""

    method_class: ClassVar = PRM

    step_separator: str = with_help("\n", "Text after each step.")
    train_on_last_step_only: bool = with_help(False, "Label the last step only.")
    max_completion_length: int | None = with_help(None, "Longest completion in tokens.")

    def dataset_row(self, columns: Sequence[str] = ()) -> DatasetSpec:
        """Return the entry for rows with labelled steps, with the separator and labelling of the arguments."""
        names = ("step_separator", "train_on_last_step_only", "max_completion_length")
        return DatasetSpec(path=ROWS, **{name: getattr(self, name) for name in names})
