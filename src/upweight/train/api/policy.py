"""The model and tokenizer a script hands over, by name or as objects, made ready to train."""

from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.methods.base import Method
from upweight.models.load import (
    AUTO_CLASSES,
    CLASSES,
    compute_dtype,
    disable_dropout,
    fit_vocabulary,
    load_model,
    master_dtype,
)
from upweight.models.tokenizer import choose_padding, load_tokenizer, take_chat_template
from upweight.train.api.configs import MethodArguments, RewardConfig, SFTConfig

Model = PreTrainedModel | PeftModel
HALF = (torch.bfloat16, torch.float16)


def tokenizer_for(
    model: str | Model, args: MethodArguments, given: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, else the model's; its end and padding tokens as the arguments say."""
    if given is not None and not isinstance(given, PreTrainedTokenizerBase):
        raise UserError(f"processing_class: expected a tokenizer, got {type(given).__name__}.")
    tokenizer = given
    if tokenizer is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        if not name:
            raise UserError("processing_class: the model was not loaded from anywhere: give its tokenizer.")
        tokenizer = load_tokenizer(model_section(name, args))
    if (template := _template_path(args)) is not None:
        take_chat_template(tokenizer, template, trust_remote_code=args.trust_remote_code)
    for key in ("eos_token", "pad_token"):
        token = getattr(args, key)
        if token is not None and token not in tokenizer.get_vocab():
            raise UserError(f"{key}: the tokenizer does not know {token!r}.")
        if token is not None:
            setattr(tokenizer, key, token)
    if tokenizer.pad_token is None:
        choose_padding(tokenizer)
    return tokenizer


def policy_for(
    model: str | Model,
    args: MethodArguments,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    peft_config: PeftConfig | None,
) -> Model:
    """The model to train, on its way: loaded if it was named, adapted if a `peft_config` was given."""
    set_seed(args.seed)
    if isinstance(model, str):
        section = model_section(model, args)
        dtype = _asked_dtype(args) or master_dtype(section, compute_dtype(section, args.device))
        fitted = tokenizer if _template_path(args) is None else None
        model = load_model(section, dtype, head=method.head, tokenizer=fitted, seed=args.seed)
    elif args.model_init_kwargs:
        warn_once("model_init_kwargs: not used, since the model is loaded already")
    if _template_path(args) is not None:
        _fit_to_template(model, args, tokenizer, peft_config)
    if tokenizer.pad_token_id is not None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if args.disable_dropout:
        disable_dropout(model)
    if peft_config is not None:
        adapted = get_peft_model(model, peft_config)
        assert isinstance(adapted, PeftModel)
        model = adapted
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no weight is trained. Load an adapter with `is_trainable=True`.")
    return model


def _template_path(args: MethodArguments) -> str | None:
    return args.chat_template_path if isinstance(args, SFTConfig | RewardConfig) else None


def _fit_to_template(
    model: Model, args: MethodArguments, tokenizer: PreTrainedTokenizerBase, peft_config: PeftConfig | None
) -> None:
    """Give the tokens that came with a chat template their embeddings, where these will be trained."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    new = len(tokenizer) - embedding.num_embeddings
    if new > 0 and (
        isinstance(model, PeftModel) or (peft_config and not getattr(peft_config, "modules_to_save", None))
    ):
        raise UserError(
            f"chat_template_path: the model does not know {new} of its tokens, and the adapter would not train them. "
            "Name the modules of the embeddings in `modules_to_save` of the peft_config, or train without an adapter."
        )
    if new > 0:
        assert isinstance(model, PreTrainedModel)
        fit_vocabulary(model, tokenizer, model_section(None, args))


def classes_for(model: str | Model, args: MethodArguments, method: Method) -> int | None:
    """Outputs that the score head has, or will have once a model given by name is loaded; None without one.

    Raises for a head that the method cannot train.
    """
    if not isinstance(model, str):
        _require_head(model, method)
    if method.head == "tokens":
        return None
    given = model_section(model, args).num_labels if isinstance(model, str) else model.config.num_labels
    if given is not None and (given != 1 if method.head == "sequence_score" else given < 2):
        kind, outputs = ("an outcome", "1 output") if method.head == "sequence_score" else ("a process", "at least 2")
        where = "model_init_kwargs" if isinstance(model, str) else "model"
        raise UserError(
            f"{where}: {kind} reward model has {outputs}, not {given}. "
            f"Load it with `num_labels={CLASSES[method.head]}`."
        )
    return given or CLASSES[method.head]


def _require_head(model: Model, method: Method) -> None:
    """Raise where a model that was handed over has a language-model head for a score head, or the other way round."""
    speaks = model.get_output_embeddings() is not None
    if speaks != (method.head == "tokens"):
        raise UserError(
            f"model: {type(model).__name__} has {'a' if speaks else 'no'} language-model head. "
            f"Load it with `{AUTO_CLASSES[method.head]}`."
        )


def dtype_for(model: nn.Module, args: MethodArguments, device: torch.device) -> torch.dtype:
    """What forwards compute in: half precision where the weights are, else as `bf16` and `fp16` say."""
    own = next((p.dtype for p in model.parameters() if p.dtype in HALF), None)
    return own or compute_dtype(model_section(None, args), device)


def reference_model(given: str | PreTrainedModel, args: MethodArguments, device: torch.device) -> PreTrainedModel:
    """The reference that a script names or hands over."""
    if not isinstance(given, str):
        return given
    return load_model(model_section(given, args), compute_dtype(model_section(None, args), device), seed=args.seed)


def model_section(name: str | None, args: MethodArguments) -> ModelSection:
    """The arguments about loading as the settings that loading reads."""
    options = dict(args.model_init_kwargs or {})
    for key in ("dtype", "torch_dtype"):
        options.pop(key, None)
    if options.pop("device_map", None) is not None:
        warn_once("model_init_kwargs: device_map has no effect: the trainer places the model")
    return ModelSection(
        base_model=name,
        num_labels=options.pop("num_labels", None),
        revision=options.pop("revision", None),
        trust_remote_code=options.pop("trust_remote_code", args.trust_remote_code),
        load_options=options,
        bf16="auto" if args.bf16 is None else args.bf16,
        fp16=args.fp16,
    )


def _asked_dtype(args: MethodArguments) -> torch.dtype | None:
    """The dtype in `model_init_kwargs`; None where it is left to the device."""
    options: dict[str, Any] = args.model_init_kwargs or {}
    asked = options.get("dtype", options.get("torch_dtype"))
    if isinstance(asked, str) and asked != "auto":
        asked = getattr(torch, asked, None)
        if not isinstance(asked, torch.dtype):
            raise UserError(f"model_init_kwargs: torch has no dtype {options.get('dtype')!r}.")
    return asked if isinstance(asked, torch.dtype) else None
