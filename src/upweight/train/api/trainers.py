"""The trainers for Python scripts, with the arguments of TRL's in the same order."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from peft import PeftConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from upweight.train.api.configs import CPOConfig, DPOConfig, KTOConfig, ORPOConfig, PRMConfig, RewardConfig, SFTConfig
from upweight.train.api.inputs import ScriptDataset, init_arguments, parts_for
from upweight.train.objects import Model
from upweight.train.trainer import MethodTrainer

EvalRows = ScriptDataset | Mapping[str, ScriptDataset] | None
Tokenizer = PreTrainedTokenizerBase | None
Callbacks = list[TrainerCallback] | None
Optimizers = tuple[Optimizer | None, LRScheduler | None]
# Every argument that scripts for TRL pass stands in its place; what is not taken may be None.


class SFTTrainer(MethodTrainer):
    """Supervised fine-tuning on text, prompts with completions, or messages."""

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, args: SFTConfig | TrainingArguments | None = None, data_collator: None = None,
        train_dataset: ScriptDataset | None = None, eval_dataset: EvalRows = None, processing_class: Tokenizer = None,
        compute_loss_func: Callable[..., Any] | None = None, compute_metrics: None = None, callbacks: Callbacks = None,
        optimizers: Optimizers = (None, None), optimizer_cls_and_kwargs: None = None,
        preprocess_logits_for_metrics: None = None, quantization_config: Any = None,
        peft_config: PeftConfig | None = None, formatting_func: Callable[[Any], str] | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(SFTConfig, **init_arguments(locals())))


class DPOTrainer(MethodTrainer):
    """Preference optimisation against a reference, by default the policy as it is at the start."""

    config_class: ClassVar[type[DPOConfig | KTOConfig]] = DPOConfig

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, ref_model: str | PreTrainedModel | None = None,
        args: DPOConfig | KTOConfig | TrainingArguments | None = None, data_collator: None = None,
        train_dataset: ScriptDataset | None = None, eval_dataset: EvalRows = None, processing_class: Tokenizer = None,
        compute_metrics: None = None, callbacks: Callbacks = None, optimizers: Optimizers = (None, None),
        quantization_config: Any = None, peft_config: PeftConfig | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(self.config_class, **init_arguments(locals())))


class KTOTrainer(DPOTrainer):
    """Optimisation on single completions labelled good or bad."""

    config_class: ClassVar = KTOConfig


class ORPOTrainer(MethodTrainer):
    """Likelihood and odds ratio of preference pairs, without a reference."""

    config_class: ClassVar[type[ORPOConfig | CPOConfig]] = ORPOConfig

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, args: ORPOConfig | CPOConfig | TrainingArguments | None = None,
        data_collator: None = None, train_dataset: ScriptDataset | None = None, eval_dataset: EvalRows = None,
        processing_class: Tokenizer = None, model_init: None = None, callbacks: Callbacks = None,
        optimizers: Optimizers = (None, None), preprocess_logits_for_metrics: None = None,
        peft_config: PeftConfig | None = None, compute_metrics: None = None, quantization_config: Any = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(self.config_class, **init_arguments(locals())))


class CPOTrainer(ORPOTrainer):
    """CPO and SimPO on preference pairs, without a reference."""

    config_class: ClassVar = CPOConfig


class RewardTrainer(MethodTrainer):
    """An outcome reward model from preference pairs."""

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, args: RewardConfig | TrainingArguments | None = None, data_collator: None = None,
        train_dataset: ScriptDataset | None = None, eval_dataset: EvalRows = None, processing_class: Tokenizer = None,
        compute_metrics: None = None, callbacks: Callbacks = None, optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: None = None, preprocess_logits_for_metrics: None = None,
        quantization_config: Any = None, peft_config: PeftConfig | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(RewardConfig, **init_arguments(locals())))


class PRMTrainer(MethodTrainer):
    """A process reward model from labelled steps."""

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self, model: str | Model, args: PRMConfig | TrainingArguments | None = None, data_collator: None = None,
        train_dataset: ScriptDataset | None = None, eval_dataset: EvalRows = None, processing_class: Tokenizer = None,
        model_init: None = None, compute_metrics: None = None, callbacks: Callbacks = None,
        optimizers: Optimizers = (None, None), preprocess_logits_for_metrics: None = None,
        peft_config: PeftConfig | None = None, quantization_config: Any = None, **unknown: Any,
    ) -> None:  # fmt: skip
        super().__init__(parts_for(PRMConfig, **init_arguments(locals())))
