"""Write or send the weights, or the adapter, in the dtype of forwards, without changing the weights in training."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from upweight.errors import UserError
from upweight.models.modules import unwrap_peft
from upweight.models.patches import spell_out_offline
from upweight.models.precision import computed_weights
from upweight.models.processor import save_processor
from upweight.models.shards import any_sharded, gathered_weights


@contextmanager
def quiet_saving() -> Iterator[None]:
    """Leave out what PEFT warns of at every save: offline or beside a GGUF file, and of adapted or grown embeddings."""
    spell_out_offline()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Could not find a config file in|Setting `save_embedding_layers`")
        yield


def save_model(
    model: PreTrainedModel | PeftModel,
    folder: Path | str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    state_dict: dict[str, Any] | None = None,  # gathered weights, where all ranks have to take part in that
) -> None:
    """Write full weights in the compute dtype, or the trained adapter in float32, and the tokenizer."""
    if isinstance(model, PeftModel):
        with quiet_saving():
            model.save_pretrained(str(folder), state_dict=state_dict, selected_adapters=list(model.active_adapters))
    else:
        weights = computed_weights(model, state_dict or model.state_dict(), dtype)
        # Gathered or cast weights share no memory, by which `save_pretrained` recognises tied ones.
        once = {name: value for name, value in weights if name not in model.all_tied_weights_keys}
        model.save_pretrained(str(folder), state_dict=once)
        # save_pretrained notes the dtype of the masters, which `dtype="auto"` would then load.
        model.config.dtype = dtype
        model.config.save_pretrained(str(folder))
    if tokenizer is not None:
        save_processor(tokenizer, str(folder))


def write_weights(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Write all weights as safetensors in `dtype`, with any adapter merged into them."""
    if not isinstance(model, PeftModel):
        write_unmerged(model, folder, dtype)
        return
    if any_sharded(model):
        raise UserError("adapter: an adapter cannot be merged into sharded weights; use one that vLLM can load itself.")
    base = unwrap_peft(model)
    tied = base.get_expanded_tied_weights_keys(all_submodels=True)
    once = {name: value for name, value in _merged_weights(model, dtype) if name not in tied}
    base.save_pretrained(str(folder), state_dict=once)


def exported_weights(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `write_weights` one by one, under their names in checkpoint files; tied weights once."""
    base = unwrap_peft(model)
    adapted = isinstance(model, PeftModel)
    weights = _merged_weights(model, dtype) if adapted else computed_weights(base, base.state_dict(), dtype)
    tied = base.get_expanded_tied_weights_keys(all_submodels=True)
    once = ((name, value) for name, value in weights if name not in tied)
    state = base.state_dict().items()
    names: dict[str, Tensor] = {name.replace(".base_layer", ""): value.to("meta") for name, value in state}
    if revert_weight_conversion(base, names).keys() == names.keys():
        return once
    # Where files hold other tensors than modules (experts, for example), all are computed at once.
    return iter(revert_weight_conversion(base, dict(once)).items())


def write_unmerged(model: PreTrainedModel | PeftModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in `dtype`, or the adapter in float32, on rank 0; every rank that holds a shard calls this."""
    sharded = any_sharded(model)
    weights = gathered_weights(model, None if isinstance(model, PeftModel) else dtype) if sharded else None
    if weights or not sharded:
        save_model(model, folder, dtype, state_dict=weights)


def refuse_unmergeable(model: PeftModel) -> None:
    """Raise for adapters that cannot be merged while they are trained."""
    adapter, *others = model.active_adapters
    if others:
        raise UserError(f"adapter: {adapter} and {', '.join(others)} are active, and one can be merged; activate one.")
    base = unwrap_peft(model)
    trained: dict[str, Any] = {}  # what changes each weight: the tensor instead of it, or the layer with its delta
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[adapter].named_parameters()
            trained |= {f"{name}.{inner}": value for inner, value in saved}
        elif isinstance(module, LoraLayer) and not hasattr(module, "get_delta_weight"):
            raise UserError(f"adapter: {type(module).__name__} cannot be merged; set 'trl.vllm_lora_sync: true'.")
        elif isinstance(module, LoraLayer) and module.use_dora.get(adapter):
            raise UserError("peft_use_dora: neither the adapter nor merged weights can be sent to vLLM; drop the key.")
        elif isinstance(module, LoraLayer) and adapter in module.r:
            trained[f"{name}.weight"] = module
    for pair in base.get_expanded_tied_weights_keys(all_submodels=True).items():
        if trained.get(pair[0]) is not trained.get(pair[1]):
            raise UserError(
                f"adapter: it trains {' and '.join(pair)} apart, which are one weight in vLLM. Leave both out, or name "
                "both in 'lora_modules_to_save' (in scripts with 'ensure_weight_tying'), or set 'trl.vllm_lora_sync'."
            )
    if getattr(base, "is_quantized", False):
        raise UserError("trl.vllm_lora_sync: weights of a quantised base cannot be merged; send the adapter alone.")


def _merged_weights(model: PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the base model under its name, with the adapter's delta added, as new tensors."""
    (adapter,) = model.active_adapters
    base = model.get_base_model()
    wrapped: list[str] = []  # prefixes of the names under PEFT's wrappers
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[adapter]
            weights = computed_weights(saved, saved.state_dict(), dtype)
        elif isinstance(module, LoraLayer):
            layer: Any = module.get_base_layer()
            state = layer.state_dict()
            if adapter in module.r:
                delta: Any = getattr(module, "get_delta_weight")(adapter)  # noqa: B009 - not on every kind of layer
                state["weight"] = layer.weight.detach().float() + delta.detach().float()
            weights = state.items()
        else:
            continue
        wrapped.append(f"{name}.")
        for inner, value in weights:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            yield f"{name}.{inner}", value.detach().to(dtype) if floating else value
    for name, value in base.state_dict().items():
        if not name.startswith(tuple(wrapped)):
            yield name, value.to(dtype) if value.is_floating_point() and value.dtype == torch.float32 else value
