"""The trainers of Python scripts: the arguments people know in, the loop of every run out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack

from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from upweight.config.sections.model import ModelSection
from upweight.data.label_balance import require_both_labels
from upweight.errors import UserError, did_you_mean
from upweight.log import warn_once
from upweight.models.precision import ComputeCopies
from upweight.train.api.configs import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    MethodArguments,
    ORPOConfig,
    PRMConfig,
    RewardConfig,
    SFTConfig,
)
from upweight.train.api.folder import recording
from upweight.train.api.policy import Model, classes_for, dtype_for, policy_for, reference_model, tokenizer_for
from upweight.train.api.rows import as_dataset, longest, prepare_rows
from upweight.train.assemble import trainer_parts
from upweight.train.reference.synced import SyncReference
from upweight.train.trainer import MethodTrainer

AnyConfig = TypeVar("AnyConfig", bound=MethodArguments)
GivenRows = Dataset | Sequence[Mapping[str, Any]]


class Inputs(TypedDict, total=False):
    """What every trainer takes besides the model and the config."""

    train_dataset: GivenRows
    eval_dataset: GivenRows | Mapping[str, GivenRows] | None
    processing_class: PreTrainedTokenizerBase | None
    peft_config: PeftConfig | None
    callbacks: list[TrainerCallback] | None
    optimizers: tuple[Optimizer | None, LRScheduler | None]
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None


class SFTTrainer(MethodTrainer):
    """Supervised fine-tuning on text, prompts with completions, or messages."""

    def __init__(
        self,
        model: str | Model,
        args: SFTConfig | None = None,
        *,
        formatting_func: Callable[[Any], str] | None = None,
        **inputs: Unpack[Inputs],
    ) -> None:
        super().__init__(**parts_for(model, config_of(args, SFTConfig), formatting_func=formatting_func, **inputs))


class DPOTrainer(MethodTrainer):
    """Preference optimisation against a reference, by default the policy as it is at the start."""

    def __init__(
        self,
        model: str | Model,
        ref_model: str | PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        **inputs: Unpack[Inputs],
    ) -> None:
        super().__init__(**parts_for(model, config_of(args, DPOConfig), ref_model, **inputs))


class KTOTrainer(MethodTrainer):
    """Optimisation on single completions labelled good or bad."""

    def __init__(
        self,
        model: str | Model,
        ref_model: str | PreTrainedModel | None = None,
        args: KTOConfig | None = None,
        **inputs: Unpack[Inputs],
    ) -> None:
        super().__init__(**parts_for(model, config_of(args, KTOConfig), ref_model, **inputs))


class ORPOTrainer(MethodTrainer):
    """Likelihood and odds ratio of preference pairs, without a reference."""

    def __init__(self, model: str | Model, args: ORPOConfig | None = None, **inputs: Unpack[Inputs]) -> None:
        super().__init__(**parts_for(model, config_of(args, ORPOConfig), **inputs))


class CPOTrainer(MethodTrainer):
    """CPO and SimPO on preference pairs, without a reference."""

    def __init__(self, model: str | Model, args: CPOConfig | None = None, **inputs: Unpack[Inputs]) -> None:
        super().__init__(**parts_for(model, config_of(args, CPOConfig), **inputs))


class RewardTrainer(MethodTrainer):
    """An outcome reward model from preference pairs."""

    def __init__(self, model: str | Model, args: RewardConfig | None = None, **inputs: Unpack[Inputs]) -> None:
        super().__init__(**parts_for(model, config_of(args, RewardConfig), **inputs))


class PRMTrainer(MethodTrainer):
    """A process reward model from labelled steps."""

    def __init__(self, model: str | Model, args: PRMConfig | None = None, **inputs: Unpack[Inputs]) -> None:
        super().__init__(**parts_for(model, config_of(args, PRMConfig), **inputs))


def config_of(args: AnyConfig | None, kind: type[AnyConfig]) -> AnyConfig:
    """The config that a script gives, or the defaults."""
    if args is not None and not isinstance(args, kind):
        raise UserError(f"args: expected a {kind.__name__} of upweight, got {type(args).__name__}.")
    return args or kind()


NOT_TAKEN = {
    "tokenizer": "it is 'processing_class' now",
    "data_collator": "rows are packed into forwards here; change the dataset instead",
    "compute_metrics": "a step has no predictions to hand out; the method's metrics are logged",
    "preprocess_logits_for_metrics": "logits are never built whole; the method's metrics are logged",
    "compute_loss_func": "the loss is the method's; choose `loss_type`, or override `training_step`",
    "model_init": "give what it returns: `model=model_init()`",
    "quantization_config": "give a model that was loaded with it: `from_pretrained(..., quantization_config=...)`",
}


def parts_for(
    model: str | Model,
    args: MethodArguments,
    ref_model: str | PreTrainedModel | None = None,
    *,
    train_dataset: GivenRows | None = None,
    eval_dataset: GivenRows | Mapping[str, GivenRows] | None = None,
    processing_class: PreTrainedTokenizerBase | None = None,
    peft_config: PeftConfig | None = None,
    callbacks: list[TrainerCallback] | None = None,
    optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
    formatting_func: Callable[[Any], str] | None = None,
    **unknown: Any,
) -> dict[str, Any]:
    """The arguments of MethodTrainer, from those of a script."""
    _refuse(model, args, ref_model, peft_config, unknown)
    _require_kinds(args, callbacks, optimizers, formatting_func)
    method, device = args.method(), args.device
    tokenizer = tokenizer_for(model, args, processing_class)

    def encode(rows: Any, where: str = "eval_dataset") -> Dataset:
        given = _formatted(as_dataset(rows, where), formatting_func, args)
        return prepare_rows(given, args, method, tokenizer, where, classes=classes_for(model, args, method))

    train = encode(train_dataset, "train_dataset")
    require_both_labels(train, method, lambda: "train_dataset, row 0")
    if isinstance(args, SFTConfig) and args.shuffle_dataset:
        train = train.shuffle(seed=args.seed)
    named = eval_dataset if isinstance(eval_dataset, Mapping) else {"eval_dataset": eval_dataset}
    held = {name: encode(rows, name) for name, rows in named.items() if rows is not None}
    policy = policy_for(model, args, method, tokenizer, peft_config)
    parts = trainer_parts(
        *(policy, method, dtype_for(policy, args, device), device),
        longest=longest(train, *held.values()) + getattr(args, "completion_room", 0),
        budget=args.token_budget,
        optimizer=getattr(args.optim, "value", args.optim),
        checkpointing=args.checkpointing_options(),
        noise=args.neftune_noise_alpha,
        layout=args.section(ModelSection).layout,
        offload=args.activation_offloading,
        separate_reference=None if ref_model is None else partial(reference_model, ref_model, args, device),
        sharding="fsdp" if args.sharded else "none",
    )
    return {
        "model": policy,
        "args": args.for_loop(lora=isinstance(policy, PeftModel)),
        "shuffle": _shuffles(args),
        "encode": encode,
        "train_dataset": train,
        "eval_dataset": held if isinstance(eval_dataset, Mapping) else held.get("eval_dataset"),
        "processing_class": tokenizer,
        "recording": partial(recording, args=args),
        "callbacks": [*(callbacks or []), *_own_callbacks(parts, foreign_optimizer=optimizers[0] is not None)],
        "optimizers": optimizers,
        "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
        **parts,
    }


def _formatted(rows: Dataset, formatting_func: Callable[[Any], str] | None, args: MethodArguments) -> Dataset:
    if formatting_func is None:
        return rows
    key = getattr(args, "dataset_text_field", "text")
    return Dataset.from_list([{key: formatting_func(row)} for row in rows])


def _require_kinds(args: MethodArguments, callbacks: Any, optimizers: Any, formatting_func: Any) -> None:
    require_kind("callbacks", callbacks, list | tuple, "a list of TrainerCallback")
    require_kind("optimizers", optimizers, tuple | list, "(optimizer, scheduler), either of them None")
    require_kind("formatting_func", formatting_func, Callable, "a function of a row")
    require_kind("model_init_kwargs", args.model_init_kwargs, Mapping, "a dict")


def require_kind(name: str, given: Any, kind: Any, told: str) -> None:
    """Raise for an input of a script that is there and of another kind than is told."""
    if given is not None and not isinstance(given, kind):
        raise UserError(f"{name}: expected {told}, got {type(given).__name__}.")


def _refuse(model: Any, args: MethodArguments, ref_model: Any, peft_config: Any, unknown: Mapping[str, Any]) -> None:
    """Raise for inputs that no trainer takes, are of another kind than is told, or do not go together."""
    for name in (name for name, given in unknown.items() if given is not None):
        known = [*Inputs.__annotations__, "model", "ref_model", "args", "formatting_func", "reward_funcs"]
        why = NOT_TAKEN.get(name) or did_you_mean(name, known).strip() or "docs/differences.md says what is not taken"
        raise TypeError(f"the trainer takes no argument '{name}': {why}")
    for name, given in (("model", model), ("ref_model", ref_model)):
        if not isinstance(given, str | Model) and (given is not None or name == "model"):
            raise UserError(
                f"{name}: expected a name, a transformers model or a PeftModel, got {type(given).__name__}."
            )
    require_kind("peft_config", peft_config, PeftConfig, "a config of peft, as LoraConfig()")
    if peft_config is not None and isinstance(model, PeftModel):
        raise UserError("peft_config: the model has an adapter already. Merge it first, or leave out peft_config.")
    if ref_model is not None and not args.method().needs_reference:
        raise UserError("ref_model: with these settings nothing is compared with a reference. Leave it out.")
    if ref_model is not None and ref_model is model:
        raise UserError("ref_model: is the model that is trained. Leave it out: the reference is then its start.")
    if ref_model is not None and getattr(args, "precompute_ref_log_probs", False):
        raise UserError("precompute_ref_log_probs: is for the policy's own start. Leave out ref_model, or turn it off.")
    if ref_model is not None and args.sharded:
        raise UserError("ref_model: a second model would not be sharded. Leave it out: the reference is sharded too.")
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs are visible to one process. Start the script with `accelerate launch` to use them all, "
            "or set CUDA_VISIBLE_DEVICES to one of them."
        )


def _own_callbacks(parts: dict[str, Any], *, foreign_optimizer: bool) -> list[TrainerCallback]:
    callbacks: list[TrainerCallback] = []
    if parts["copies"] is not None:
        callbacks.append(PlainModelAfterwards(parts["copies"], following=not foreign_optimizer))
    synced = parts["method"].reference_sync
    if synced is not None:
        callbacks.append(SyncReference(parts["reference"], synced))
    return callbacks


def _shuffles(args: MethodArguments) -> bool:
    if args.train_sampling_strategy not in ("random", "sequential"):
        warn_once(f"train_sampling_strategy: {args.train_sampling_strategy} has no effect: forwards hold equal tokens")
    return args.train_sampling_strategy != "sequential"


class PlainModelAfterwards(TrainerCallback):
    """Leaves a model that can be merged, moved and copied: after training it reads its masters again."""

    def __init__(self, copies: ComputeCopies, *, following: bool) -> None:
        self.copies, self.following = copies, following  # the trainer makes copies follow the optimizer it creates

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.following:
            self.copies.rebuild()
            self.copies.follow(kwargs["optimizer"])
            self.following = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.copies.remove()
        self.following = False
