"""The Python objects that a script passes to its trainer beside the arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainingArguments

from upweight.config.sections.data import DataSection

Model = PreTrainedModel | PeftModel
Tokenizer = PreTrainedTokenizerBase
ReadRows = Callable[[Any, str], tuple[Dataset | IterableDataset, DataSection]]


@dataclass(frozen=True)
class Objects:
    """The objects of a script that a config cannot hold; all are unset for a run from YAML."""

    arguments: TrainingArguments | None = None  # of the script
    changed_arguments: Callable[[], Sequence[str]] = tuple  # names of those that the script has changed since
    model: Model | None = None  # None: loaded from the config's base_model
    load_dtype: torch.dtype | None = None  # for a model that is loaded by name
    reference: str | PreTrainedModel | None = None  # None: the initial policy
    teacher_model: str | Model | None = None  # None: loaded from the place that the config names
    tokenizer: Tokenizer | ProcessorMixin | None = None
    train_dataset: Any = None  # or a mapping of names to datasets, which are mixed
    eval_dataset: Any = None  # or a mapping of names to datasets
    read_rows: ReadRows | None = None  # (raw rows, name of their argument) -> a Dataset and its settings
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
    translate_error: Callable[[str], str] = str  # puts the script's argument names in place of config keys

    @property
    def from_script(self) -> bool:
        """Whether a script started this training, and continues after it."""
        return self.arguments is not None

    def train_sets(self) -> Mapping[str, Any]:
        """Return the training sets by name; a single set is named `train_dataset`."""
        return self.train_dataset if isinstance(self.train_dataset, Mapping) else {"train_dataset": self.train_dataset}

    def eval_sets(self) -> Mapping[str, Any]:
        """Return the evaluation sets by name; a single set is named `eval_dataset`."""
        if isinstance(self.eval_dataset, Mapping):
            return self.eval_dataset
        return {} if self.eval_dataset is None else {"eval_dataset": self.eval_dataset}


YAML_ONLY = Objects()
