"""What a script hands over as Python objects, beside what its arguments say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from upweight.config.sections.data import DataSection

Model = PreTrainedModel | PeftModel
ReadRows = Callable[[Any, str], tuple[Dataset, DataSection]]


@dataclass(frozen=True)
class Objects:
    """Everything that no config can hold; all of it is None for a run from YAML."""

    arguments: TrainingArguments | None = None  # the script's own, which say how long, how often and where
    model: Model | None = None  # None: loaded as the config says
    load_dtype: torch.dtype | None = None  # that a named model is loaded in
    reference: str | PreTrainedModel | None = None  # None: the policy as it is at the start
    tokenizer: PreTrainedTokenizerBase | None = None
    train_dataset: Any = None
    eval_dataset: Any = None  # or several, by their names
    read_rows: ReadRows | None = None  # raw rows and the argument they came by -> a Dataset and how it is read
    reward_funcs: Any = None
    reward_tokenizers: Any = None
    tools: Any = None
    environment_factory: Any = None
    rollout_func: Callable[..., Any] | None = None
    peft_config: PeftConfig | None = None
    quantization_config: Any = None  # of bitsandbytes, for a named model
    callbacks: tuple[TrainerCallback, ...] = ()
    optimizers: tuple[Any, Any] = (None, None)
    optimizer_class: tuple[type, dict[str, Any]] | None = None  # with its arguments
    chat_template_path: str | None = None  # a file, or a tokenizer that has the template
    translate_error: Callable[[str], str] = (
        str  # an error about keys of a config -> the same about the script's arguments
    )

    @property
    def from_script(self) -> bool:
        """Whether a script asked for this run, and its own loop goes on after it."""
        return self.arguments is not None

    def eval_sets(self) -> Mapping[str, Any]:
        """The rows to evaluate on by name; one set alone goes by the argument's."""
        if isinstance(self.eval_dataset, Mapping):
            return self.eval_dataset
        return {} if self.eval_dataset is None else {"eval_dataset": self.eval_dataset}


YAML_ONLY = Objects()
