"""Unwrap a model, walk its modules, switch off dropout, and give modules another forward or hidden arguments."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from upweight.errors import UserError

GATED_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # the linear layers of a gated MLP

T = TypeVar("T")


@contextmanager
def context_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside, and restore its value afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return each module of a model once, three times as fast as `modules()`, which takes as long as a first token."""
    modules, queue = {model: None}, [model]
    while queue:
        for child in queue.pop()._modules.values():
            if child is not None and child not in modules:
                modules[child] = None
                queue.append(child)
    return list(modules)


def dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield each dropout probability in a model: its module, which may call a function with it, its name and value."""
    for module in every_module(model):
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                yield module, name, value


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode inside, and restore the mode of every module afterwards."""
    trained = [module for module in every_module(model) if module.training]
    try:
        for module in trained:
            vars(module)["training"] = False  # not by `eval()`, which takes longer than sampling's first token
        yield
    finally:
        for module in trained:
            vars(module)["training"] = True


def wrap_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Bind another forward to a module, once; it finds the stock one as `_stock_forward`, also in a deep copy."""
    if "_stock_forward" not in vars(module):
        vars(module)["_stock_forward"] = module.forward
        module.forward = MethodType(forward, module)


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let modules run other forwards inside."""
    before = [(module, vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            module.forward = MethodType(forward, module)
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def unwrap_peft(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PeftModel, or the model itself."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]
    if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        raise UserError("prompt and prefix tuning put tokens before the sequence and cannot be trained; use LoRA")
    if not isinstance(base, PreTrainedModel):
        raise UserError(f"expected a transformers model, got {type(base).__name__}")
    return base


def backbone_of(base: PreTrainedModel) -> nn.Module:
    """Return the part of a model below its head."""
    body = base.base_model
    return base.model if body is base else body  # text halves of larger models have another `base_model_prefix`


def refuse_ruined_weights(model: nn.Module) -> None:
    """Raise where a weight, or the shard of it on this rank, holds NaN or infinity."""
    for name, weight in model.named_parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.is_floating_point() and not bool(local.isfinite().all()):
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            raise UserError(
                f"the weight {plain} holds NaN or infinity, and so does all that the model computes. Of a model that "
                "a run or a merge wrote, take a checkpoint from before and a lower `learning_rate`; of another, copy "
                "or download it again."
            )
