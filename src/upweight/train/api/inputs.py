"""Turn the inputs of a script's trainer into a checked config and objects, and build the trainer's parts."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from upweight.config.explain import brief
from upweight.config.sections.data import DataSection
from upweight.data.images.row_images import COLUMNS
from upweight.errors import UserError, WrongTypeError, did_you_mean, foreign_cause
from upweight.log import logger, warn_once
from upweight.methods.users.function import UserFunction
from upweight.models.adapters.attach import kept_adapter
from upweight.models.load import AUTO_CLASSES
from upweight.models.vision import vision_family
from upweight.train.api.as_config import build_config, checked_config, error_translator
from upweight.train.api.configs import MethodArguments
from upweight.train.api.other_names import advice
from upweight.train.assemble import TrainerParts, assemble
from upweight.train.machine_checks import require_machine
from upweight.train.objects import Model, Objects, ReadRows
from upweight.user_modules import asked_names, named_call

AnyConfig = TypeVar("AnyConfig", bound=MethodArguments)
ScriptDataset = Dataset | IterableDataset | Sequence[Mapping[str, Any]]
DATASETS = ("train_dataset", "eval_dataset")
PASSED_OBJECTS = (
    *DATASETS,
    "teacher_model",
    "reward_funcs",
    "reward_tokenizers",
    "tools",
    "rollout_func",
    "environment_factory",
)
PROCESSING_CLASS = PreTrainedTokenizerBase | ProcessorMixin
NO_INPUTS = ("self", "__class__", "unknown")
NO_PROMPT = [{"role": "user", "content": ""}]
NOT_TAKEN = {
    "tokenizer": "It is 'processing_class' now.",
    "data_collator": "Rows are packed into forwards here; change the dataset instead.",
    "compute_metrics": "A step has no predictions to hand out; the method's metrics are logged.",
    "preprocess_logits_for_metrics": "Logits are never built whole; the method's metrics are logged.",
    "model_init": "Give what it returns: `model=model_init()`.",
}


def init_arguments(local_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer's `__init__` from its `locals()`, without those that are None."""
    inputs = {**local_names, **local_names["unknown"]}
    return {name: value for name, value in inputs.items() if name not in NO_INPUTS and value is not None}


def _advice(name: str, kind: type[MethodArguments]) -> str:
    """Return what to do with an argument that trainers do not take."""
    taken = [one.name for one in dataclasses.fields(kind)]
    known = [*inspect.signature(parts_for).parameters, *PASSED_OBJECTS]
    if name in NOT_TAKEN:
        return NOT_TAKEN[name]
    if name in taken:
        return f"It is one of {kind.__name__}: 'args={kind.__name__}({name}=...)'."
    near = did_you_mean(name, known).strip()
    return near or f"Of {kind.__name__}: {advice(name, taken, online=kind.method_class.online)}"


def parts_for(
    kind: type[MethodArguments],
    *,
    model: str | Model | None = None,
    args: TrainingArguments | None = None,
    ref_model: str | PreTrainedModel | None = None,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    peft_config: PeftConfig | None = None,
    quantization_config: Any = None,
    callbacks: Any = (),
    optimizers: Any = (None, None),
    optimizer_cls_and_kwargs: Any = None,
    formatting_func: Callable[[Any], str] | None = None,
    compute_loss_func: Callable[..., Any] | None = None,
    **others: Any,
) -> TrainerParts:
    """Build the parts of a trainer from a script's inputs; `others` are further fields of `Objects`."""
    if unknown := [name for name in others if name not in PASSED_OBJECTS]:
        problems = [f"the trainer takes no argument '{name}'. {_advice(name, kind)}" for name in unknown]
        raise WrongTypeError("\n".join(problems))
    passed, args = args, _with_loss(convert_arguments(args, kind), compute_loss_func)
    require_type("peft_config", peft_config, PeftConfig, "a config of peft, as LoraConfig()")
    if isinstance(model, PreTrainedModel) and (kept := kept_adapter(model, peft_config)) is not None:
        _say_going_on(asked=peft_config is not None)
        model, peft_config = kept, None
    _refuse_inputs(model, args, ref_model, peft_config, others)
    _require_callbacks(callbacks)
    require_type("optimizers", optimizers, tuple | list, "(optimizer, scheduler), either of them None")
    require_type("formatting_func", formatting_func, Callable, "a function of a row")
    require_type("processing_class", processing_class, PROCESSING_CLASS, "a tokenizer or a processor")
    if quantization_config is None:
        quantization_config = _quantised_in(args.model_init_kwargs or {})
    require_type("quantization_config", quantization_config, BitsAndBytesConfig, "a BitsAndBytesConfig")
    name, load_dtype = (model, _init_dtype(args)) if isinstance(model, str) else (None, None)
    if name is None:
        _warn_of_unused({"model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization_config})
    objects = Objects(
        arguments=args,
        changed_arguments=partial(_changed, passed, copy.copy(passed)),
        model=None if isinstance(model, str) else model,
        load_dtype=load_dtype,
        quantization_config=None if name is None else quantization_config,
        reference=ref_model,
        tokenizer=processing_class,
        read_rows=reader(args, formatting_func, model, owns_prompts="environment_factory" in others),
        peft_config=peft_config,
        callbacks=tuple(callbacks),
        optimizers=tuple(optimizers),
        optimizer_class=optimizer_cls_and_kwargs,
        chat_template_path=getattr(args, "chat_template_path", None),
        translate_error=error_translator(kind),
        **others,
    )
    try:
        config = checked_config(args, objects, name)
        require_machine(config, trains=True)
        return assemble(config, objects)
    except UserError as error:
        raise UserError(objects.translate_error(str(error))) from foreign_cause(error)


def _say_going_on(*, asked: bool) -> None:
    """Say that the adapter of an earlier trainer trains on; warn where one is `asked` for, as by a cell run again."""
    going_on = "model: going on with the adapter that an earlier trainer gave it"
    if asked:
        logger.warning("warning: %s; for a fresh one, load the model again", going_on)
    else:
        logger.info("%s", going_on)


def convert_arguments(args: TrainingArguments | None, kind: type[AnyConfig]) -> AnyConfig:
    """Return the script's config, or the defaults; plain TrainingArguments are converted with all their values."""
    if args is None:
        return kind()
    if type(args) is TrainingArguments:
        return kind(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init})
    if not isinstance(args, kind):
        raise UserError(f"args: expected a {kind.__name__} of upweight, got {type(args).__name__}.")
    return args


def _changed(args: TrainingArguments | None, before: TrainingArguments | None) -> list[str]:
    """Return the names of the arguments that differ from what they were."""
    if args is None:
        return []
    return [one.name for one in dataclasses.fields(args) if getattr(args, one.name) != getattr(before, one.name)]


def _with_loss(args: AnyConfig, function: Callable[..., Any] | None) -> AnyConfig:
    """Return the arguments with a function as the loss, if any; one of logits and labels is refused."""
    if function is None:
        return args
    loss = next((one.name for one in dataclasses.fields(args) if one.name == "loss_type"), None)
    if loss is None:
        raise UserError(f"compute_loss_func: {type(args).__name__} has no `loss_type` that it could take the place of.")
    if {"outputs", "labels"} & set(asked_names(function)):
        remedy = "Ask for `logps` and `mask` instead: `upweight docs your_own_method` has the names."
        raise UserError(f"compute_loss_func: logits are never built whole here, so there are no outputs. {remedy}")
    args = copy.copy(args)
    setattr(args, loss, UserFunction.of(function))
    args.method()  # with errors in the words of the arguments
    return args


def reader(
    args: MethodArguments,
    formatting_func: Callable[[Any], str] | None,
    model: str | Model | None = None,
    *,
    owns_prompts: bool = False,
) -> ReadRows:
    """Return a function that turns rows into a Dataset and its settings; `owns_prompts`: an environment has prompts."""
    reads_images = isinstance(model, str) or (model is not None and vision_family(model.config) is not None)

    def read(raw: Any, where: str) -> tuple[Dataset | IterableDataset, DataSection]:
        rows = as_dataset(raw, where)
        columns = _columns(rows, where)
        if owns_prompts and "prompt" not in columns:
            if isinstance(rows, IterableDataset):
                rows = rows.map(lambda row: {"prompt": NO_PROMPT})
            else:
                rows = rows.add_column("prompt", [NO_PROMPT] * len(rows))
        if formatting_func is not None:
            called = named_call(formatting_func, f"{where}: formatting_func failed")
            text, write = getattr(args, "dataset_text_field", "text"), partial(_formatted, called)
            if isinstance(rows, IterableDataset):
                rows = rows.map(lambda row: {text: write(row)}, remove_columns=columns)
            else:
                rows = Dataset.from_list([{text: write(row)} for row in rows])
        columns = _columns(rows, where)
        images = [column for column in columns if column in COLUMNS]
        if images and not reads_images:
            problem = f"the column '{images[0]}' holds images, which this model does not read"
            raise UserError(f"{where}: {problem}: remove it, or name a vision-language model.")
        settings = {"datasets": [args.dataset_row(columns)], "train_on_inputs": args.trains_on_prompts(columns, where)}
        return rows, build_config(args).data.model_copy(update=settings)

    return read


def _quantised_in(init_kwargs: Mapping[str, Any]) -> BitsAndBytesConfig | None:
    """Return the quantisation among the arguments of loading, where scripts for TRL write it."""
    for bits in ("load_in_4bit", "load_in_8bit"):
        if init_kwargs.get(bits):
            remedy = f"'quantization_config=BitsAndBytesConfig({bits}=True)' of the trainer loads so"
            raise UserError(f"model_init_kwargs: '{bits}' is no argument of loading any more: {remedy}.")
    packed = init_kwargs.get("quantization_config")
    return packed if isinstance(packed, BitsAndBytesConfig) else None


def _formatted(formatting_func: Callable[[Any], str], row: Any) -> str:
    """Return the text of one row; raise where the function returns something else, as one for batches does."""
    text = formatting_func(row)
    if not isinstance(text, str):
        raise UserError(
            f"formatting_func: gets one row and returns its text, but returned {brief(text)}; one for batches returns "
            "a list: let it read the values of one row."
        )
    return text


def _columns(rows: Dataset | IterableDataset, where: str) -> list[str]:
    """Return the names of the columns; those of a stream without features are its first row's."""
    if rows.column_names is not None:
        return rows.column_names
    first = next(iter(rows), None)
    if first is None:
        raise UserError(f"{where}: has no rows.")
    return list(first)


def as_dataset(rows: Any, where: str) -> Dataset | IterableDataset:
    """Return rows as a Dataset, or as the stream that they are; raise where they are neither nor a list of mappings."""
    if isinstance(rows, IterableDataset):
        return rows.with_format(None)
    if isinstance(rows, Dataset):
        return rows if rows.format["type"] == "custom" else rows.with_format(None)  # a transform is part of the rows
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        got = f"expected a Dataset, an IterableDataset or a list of rows, got {type(rows).__name__}"
        if type(rows).__name__ == "DataFrame":
            raise UserError(f"{where}: {got}. `Dataset.from_pandas` makes a Dataset of it.")
        raise UserError(f"{where}: {got}. `Dataset.from_generator` makes one of anything that yields rows.")
    names = dict.fromkeys(name for row in rows for name in row)  # from_list takes those of the first row alone
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        return Dataset.from_dict(columns)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        differing = next(filter(None, (_differing(name, values) for name, values in columns.items())), str(error))
        raise UserError(f"{where}: the rows differ in what their columns hold: {differing}") from error


def _differing(name: str, values: Sequence[Any]) -> str | None:
    """Return the first two rows whose values in a column are of different types; None where all have the same."""
    held = [(number, value) for number, value in enumerate(values) if value is not None]
    kinds = [(number, "a number" if isinstance(value, int | float) else _kind(value)) for number, value in held]
    other = next(((number, kind) for number, kind in kinds if kind != kinds[0][1]), None)
    if other is None:
        return None
    return f"'{name}' is {kinds[0][1]} in row {kinds[0][0]} and {other[1]} in row {other[0]}. Write all rows alike"


def _kind(value: Any) -> str:
    return {str: "text", list: "a list", dict: "a mapping"}.get(type(value), type(value).__name__)


def require_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raise where an input of a script is set and has the wrong type."""
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{name}: expected {expected}, got {type(value).__name__}.")


def _warn_of_unused(loading: Mapping[str, Any]) -> None:
    for argument, value in loading.items():
        if value:
            warn_once(f"{argument}: not used, since the model is loaded already")


def _require_callbacks(callbacks: Any) -> None:
    require_type("callbacks", callbacks, list | tuple, "a list of TrainerCallback")
    for one in callbacks:
        if not isinstance(one, TrainerCallback | type):
            raise UserError(f"callbacks: expected objects or classes of TrainerCallback, got {brief(one)}.")


def _refuse_inputs(
    model: Any, args: MethodArguments, ref_model: Any, peft_config: Any, others: Mapping[str, Any]
) -> None:
    """Raise for models and adapters of the wrong type, or that do not fit each other, and for missing rows."""
    for name, value in (("model", model), ("ref_model", ref_model), ("teacher_model", others.get("teacher_model"))):
        if not isinstance(value, str | Model) and (value is not None or name == "model"):
            kinds = "a name, a transformers model or a PeftModel"
            raise UserError(f"{name}: expected {kinds}, got {type(value).__name__}.")
    head = args.method_class.head
    if isinstance(model, Model) and (model.get_output_embeddings() is None) == (head == "tokens"):
        has = f"{type(model).__name__} has {'no' if head == 'tokens' else 'a'} language-model head"
        raise UserError(f"model: {has}. Load it with `{AUTO_CLASSES[head]}`.")
    if peft_config is not None and isinstance(model, PeftModel):
        raise UserError("peft_config: the model has an adapter already. Merge it first, or leave out peft_config.")
    if ref_model is not None and not args.method().needs_reference:
        raise UserError("ref_model: with these settings nothing is compared with a reference. Leave it out.")
    if ref_model is not None and ref_model is model:
        raise UserError("ref_model: is the model that is trained. Leave it out: the reference is then its start.")
    if args.n_gpu > 1:
        remedy = "Start the script with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one of them."
        raise UserError(f"{args.n_gpu} GPUs are visible to one process. {remedy}")
    _require_rows(others.get("train_dataset"))
    if args.eval_strategy != "no" and others.get("eval_dataset") is None:
        problem = f"eval_strategy: '{IntervalStrategy(args.eval_strategy).value}' needs rows to evaluate on"
        raise UserError(f"{problem}. Pass an `eval_dataset`, or leave it out.")
    _require_best_metric(args, others.get("eval_dataset"))


def _require_best_metric(args: MethodArguments, sets: Any) -> None:
    """Raise where no evaluation will have the metric that chooses the best checkpoint: several sets prefix theirs."""
    best = (args.metric_for_best_model or "").removeprefix("eval_")
    if not best or args.eval_strategy == "no" or not isinstance(sets, Mapping) or not sets:
        return
    if not any(best.startswith(f"{name}_") for name in sets):
        names = " or ".join(f"'{name}_{best}'" for name in sets)
        raise UserError(f"metric_for_best_model: several evaluation sets have {names}, not '{best}'. Name one of them.")


def _require_rows(rows: Any) -> None:
    """Raise where there is nothing to train on, or where it is a dataset's splits, of which some are for evaluation."""
    if rows is None:
        raise UserError("`train_dataset` is required: a Dataset, an IterableDataset, or a list of rows.")
    if isinstance(rows, DatasetDict | IterableDatasetDict):
        split = next(iter(rows), "train")
        remedy = f"Pass one, as `dataset['{split}']`; a plain dict of datasets is a mixture of them."
        expected = "`train_dataset` must be a `Dataset` or `IterableDataset`"
        raise WrongTypeError(f"{expected}, and a {type(rows).__name__} holds splits. {remedy}")


def _init_dtype(args: MethodArguments) -> torch.dtype | None:
    """Return the dtype in `model_init_kwargs`; None where the device decides."""
    options: dict[str, Any] = args.model_init_kwargs or {}
    given = options.get("dtype", options.get("torch_dtype"))
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if isinstance(given, str) and given != "auto" and not isinstance(dtype, torch.dtype):
        raise UserError(f"model_init_kwargs: torch has no dtype {given!r}.")
    return dtype if isinstance(dtype, torch.dtype) else None
