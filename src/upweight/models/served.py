"""Write the weights as they are computed with, for a server to load; the copy that is trained is left alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.models.pieces import gathered_weights, lies_in_pieces
from upweight.models.precision import computed_weights
from upweight.models.save import save_model


def write_adapter(model: PeftModel, folder: Path) -> None:
    """The adapter alone, in float32, with the config that says how to apply it."""
    _write(model, folder, torch.float32)


def write_weights(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """All weights as safetensors in `dtype`, an adapter merged into them."""
    if not isinstance(model, PeftModel):
        _write(model, folder, dtype)
        return
    if lies_in_pieces(model):
        raise UserError("adapter: an adapter cannot be merged into sharded weights; use one that vLLM can load itself.")
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    weights = dict(_merged(model, dtype))
    tied = {name: of for name, of in base.get_expanded_tied_weights_keys(all_submodels=True).items() if name in weights}
    for name, source in tied.items():
        if torch.equal(weights[name], weights[source]):
            del weights[name]
    base.save_pretrained(str(folder), state_dict=weights)


def _write(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Save on rank 0; where weights lie in pieces, every rank calls this and gives its own."""
    if not lies_in_pieces(model):
        save_model(model, folder, dtype)
        return
    weights = gathered_weights(model, None if isinstance(model, PeftModel) else dtype)
    if weights:
        save_model(model, folder, dtype, state_dict=weights)


def refuse_unmergeable(model: PeftModel) -> None:
    """Raise for adapters that cannot be merged while they are trained."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and not hasattr(module, "get_delta_weight"):
            raise UserError(
                f"adapter: {type(module).__name__} cannot be merged for the server; set 'trl.vllm_lora_sync: true'."
            )
        if isinstance(module, LoraLayer) and module.use_dora.get(model.active_adapters[0]):
            raise UserError("peft_use_dora: neither the adapter nor merged weights can be sent to vLLM; drop the key.")
    if getattr(model.get_base_model(), "is_quantized", False):
        raise UserError(
            "trl.vllm_lora_sync: false: merged weights of a quantised base cannot be sent; send the adapter alone."
        )


def _merged(model: PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the base model by its own name, with what the adapter adds to it, as new tensors."""
    (adapter,) = model.active_adapters
    base = model.get_base_model()
    replaced: dict[str, Any] = {}
    inside: dict[str, str] = {}  # names under PEFT's wrappers, by what stands before them in the base
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[adapter]
            replaced |= {
                f"{name}.{inner}": value for inner, value in computed_weights(saved, saved.state_dict(), dtype)
            }
            inside[name] = f"{name}."
        elif isinstance(module, LoraLayer):
            inside[name] = f"{name}."
            own: Any = module.get_base_layer()
            replaced |= {f"{name}.{inner}": value for inner, value in own.state_dict().items()}
            if adapter in module.r:
                delta: Any = getattr(module, "get_delta_weight")(adapter)  # noqa: B009 - not on every kind of layer
                replaced[f"{name}.weight"] = own.weight.detach().float() + delta.detach().float()
    for name, value in base.state_dict().items():
        if not name.startswith(tuple(inside.values())):
            yield name, value.to(dtype) if value.is_floating_point() and value.dtype == torch.float32 else value
    for name, value in replaced.items():
        floating = isinstance(value, Tensor) and value.is_floating_point()
        yield name, value.detach().to(dtype) if floating else value
