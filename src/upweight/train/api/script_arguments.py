"""The command line of a training script, with TRL's names: its arguments for model and data, and their parser."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, HfArgumentParser

from upweight.config.yaml_file import read_yaml
from upweight.errors import UserError, did_you_mean
from upweight.train.api.fields import with_help

FILE_OPTION = "--config"
MOVED = {  # attributes of ModelConfig that scripts for older TRL read
    "trust_remote_code": "It is an argument of the trainer's config: read `training_args.trust_remote_code`.",
    "torch_dtype": "It is called `dtype` now.",
}


@dataclass
class ScriptArguments:
    """Which rows a script trains on; the script itself loads them."""

    dataset_name: str | None = with_help(None, "Name or path for `datasets.load_dataset`.")
    dataset_config: str | None = with_help(None, "Configuration of the dataset: the `name` of `load_dataset`.")
    dataset_train_split: str = with_help("train", "Split that is trained on.")
    dataset_test_split: str = with_help("test", "Split that is evaluated on.")
    dataset_streaming: bool = with_help(False, "Whether the dataset is streamed.")
    ignore_bias_buffers: bool = with_help(False, "For scripts that read it; ranks need no such exception here.")


@dataclass
class ModelConfig:
    """How a script loads its model, and the adapter it trains; see `get_peft_config`."""

    model_name_or_path: str | None = with_help(None, "Hub id or folder of the model.")
    model_revision: str = with_help("main", "Branch, tag or commit of the hub.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = with_help("float32", "Dtype to load weights in.")
    attn_implementation: str | None = with_help(None, "Attention of transformers.")
    use_peft: bool = with_help(False, "Train a LoRA instead of all weights.")
    lora_r: int = with_help(16, "Rank of the LoRA.")
    lora_alpha: int = with_help(32, "Scale of the LoRA, divided by its rank.")
    lora_dropout: float = with_help(0.05, "Dropout before the LoRA.")
    lora_target_modules: list[str] | None = with_help(None, "Modules to adapt, or `all-linear`.")  # noqa: RUF009
    lora_target_parameters: list[str] | None = with_help(None, "Parameters to adapt, as of experts.")  # noqa: RUF009
    lora_modules_to_save: list[str] | None = with_help(None, "Modules that are trained whole.")  # noqa: RUF009
    lora_task_type: str = with_help("CAUSAL_LM", "PEFT's task type; SEQ_CLS for reward models.")
    use_rslora: bool = with_help(False, "Divide `lora_alpha` by the square root of the rank.")
    use_dora: bool = with_help(False, "Learn the length of each weight's columns apart (DoRA).")
    load_in_8bit: bool = with_help(False, "Quantise frozen weights to 8 bits.")
    load_in_4bit: bool = with_help(False, "Quantise frozen weights to 4 bits.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = with_help("nf4", "Kind of 4-bit numbers.")
    use_bnb_nested_quant: bool = with_help(False, "Quantise the scales of 4-bit weights too.")
    bnb_4bit_quant_storage: str | None = with_help(None, "Dtype in which 4-bit weights are stored.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise UserError("load_in_8bit, load_in_4bit: both are set. Keep one of them.")

    def __getattr__(self, name: str) -> Any:
        """Raise with the place of an argument that has moved; Python calls this for attributes that are not there."""
        where = f". {MOVED[name]}" if name in MOVED else ""
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'{where}")


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """Return the LoRA that the arguments ask for; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    modules = model_args.lora_target_modules
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=modules[0] if modules is not None and len(modules) == 1 else modules,  # such as all-linear
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        bias="none",
        inference_mode=False,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return the quantisation that the arguments ask for, or None."""
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    dtype = model_args.dtype if model_args.dtype not in (None, "auto") else "bfloat16"
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Return a `device_map` with all of a quantised model on this process's GPU; None without one."""
    return {"": int(os.environ.get("LOCAL_RANK", "0"))} if torch.cuda.is_available() else None


class TrlParser(HfArgumentParser):
    """Read the arguments of dataclasses from the command line, and their defaults from the YAML file of `--config`."""

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kinds = list(dataclass_types) if isinstance(dataclass_types, Iterable) else [dataclass_types]
        for kind in [kind for kind in kinds if kind is not None]:
            if "config" in {argument.name for argument in fields(kind)}:
                raise UserError(f"{kind.__name__}.config: `{FILE_OPTION}` names the YAML file. Rename the field.")
        super().__init__([kind for kind in kinds if kind is not None], **kwargs)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Return one instance for each dataclass. The command line goes before the file of `--config`.

        The key `env` of the file holds environment variables to set. Arguments that no dataclass has are an error,
        or, with `return_remaining_strings`, a list at the end.
        """
        words = list(sys.argv[1:] if args is None else args)
        file = _taken_out(words)
        unknown = self._set_defaults(read_yaml(Path(file))) if file is not None else {}
        *parsed, rest = self.parse_args_into_dataclasses(words, return_remaining_strings=True)
        rest = [*rest, *(word for key, value in unknown.items() for word in (f"--{key}", str(value)))]
        if return_remaining_strings:
            return (*parsed, rest)
        if rest and fail_with_unknown_args:
            name = next((word for word in rest if word.startswith("--")), rest[0]).lstrip("-").partition("=")[0]
            near = did_you_mean(name, self._known())
            raise UserError(f"{' '.join(rest)}: no such argument.{near} `--help` lists them all.")
        return tuple(parsed)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Make these the defaults of their arguments; return the others as words of a command line."""
        return [word for key, value in self._set_defaults(values).items() for word in (f"--{key}", str(value))]

    def _set_defaults(self, values: dict[str, Any]) -> dict[str, Any]:
        """Make a file's values the defaults of their arguments, set its environment, and return what is neither."""
        values = dict(values)
        environment = values.pop("env", {})
        if not isinstance(environment, dict):
            raise UserError("env: must map names of environment variables to values.")
        os.environ.update({str(name): str(value) for name, value in cast(dict[Any, Any], environment).items()})
        for action in self._actions:
            if action.dest in values:
                action.default, action.required = values[action.dest], False
        return {key: value for key, value in values.items() if key not in self._known()}

    def _known(self) -> set[str]:
        return {action.dest for action in self._actions}


def _taken_out(words: list[str]) -> str | None:
    """Remove `--config FILE` or `--config=FILE` from the words, and return the file."""
    for place, word in enumerate(words):
        if word == FILE_OPTION:
            if place + 1 == len(words):
                raise UserError(f"{FILE_OPTION}: name a YAML file after it.")
            _, file = words.pop(place), words.pop(place)
            return file
        if word.startswith(f"{FILE_OPTION}="):
            return words.pop(place).partition("=")[2]
    return None
