"""Merge an adapter with one file of the base's weights in memory at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from upweight.config.sections.model import ModelSection
from upweight.models.load import Head, config_with_head, model_class
from upweight.models.source import load_failures, source_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class MergedWeight:
    """How a weight is merged: by a function of the base's weight in float32, or by replacement."""

    merge: Callable[[Tensor], Tensor] | None
    replacement: Tensor | None = None


def merge_by_file(section: ModelSection, head: Head, adapter: Path, tokens: int, output: Path) -> str | None:
    """Write merged weights and config to `output`; return why not, where only the whole model can be merged."""
    files = _files(section)
    if not files:
        return "its weights are not in safetensors files"
    config = PeftConfig.from_pretrained(str(adapter))
    if not isinstance(config, LoraConfig) or config.target_parameters or config.bias != "none" or config.lora_bias:
        return "the adapter changes more than the weights of layers"
    with torch.device("meta"):
        base = model_class(section, head).from_config(config_with_head(section, head))
    embedding = base.get_input_embeddings()
    if tokens > embedding.num_embeddings:
        return "its vocabulary has grown"
    in_model, tied = set(base.state_dict()), base.get_expanded_tied_weights_keys(all_submodels=True)
    prefix = base.base_model_prefix
    plan = new_weights(_with_adapter(base, adapter))
    names = {key: name for file in files for key in _keys(file) if (name := _model_name(key, in_model, prefix))}
    in_files = set(names.values())
    replaced = {name: new.replacement.detach() for name, new in plan.items() if new.replacement is not None}
    if in_model - in_files - set(replaced) - set(tied) or not set(plan) <= in_files | set(replaced):
        return "its files name weights otherwise than the model"
    if any(not _stay_tied(plan.get(target), plan.get(source)) for target, source in tied.items()):
        return "the adapter changes one of two weights that were tied"
    added = {name: value for name, value in replaced.items() if name not in in_files and name not in tied}
    _write(files, names, plan, added, output)
    _write_configs(base, output)
    return None


def new_weights(model: PeftModel) -> dict[str, MergedWeight]:
    """Return how PEFT changes each weight that the adapter touches, by the names of the base model."""
    (adapter,) = model.active_adapters
    plan: dict[str, MergedWeight] = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            weights = module.modules_to_save[adapter].state_dict()
            plan |= {f"{name}.{inner}": MergedWeight(None, value) for inner, value in weights.items()}
        elif isinstance(module, LoraLayer) and adapter in module.r:
            plan[f"{name}.weight"] = MergedWeight(lambda weight, module=module: _merged(module, weight, adapter))
    return plan


def _with_adapter(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """Attach an adapter with its weights to a model without weights."""
    hollow: dict[nn.Parameter, nn.Parameter] = {}
    for module in base.modules():
        for name, weight in module.named_parameters(recurse=False):
            # Not left on the meta device: PEFT moves an adapter to where its base is.
            empty = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, hollow.setdefault(weight, nn.Parameter(empty, requires_grad=False)))
    return PeftModel.from_pretrained(base, str(adapter), low_cpu_mem_usage=True)


def _merged(module: LoraLayer, weight: Tensor, adapter: str) -> Tensor:
    """Run PEFT's merge of one layer, with the weight put in place for its duration."""
    layer = module.get_base_layer()
    empty, layer.weight = layer.weight, nn.Parameter(weight, requires_grad=False)
    module.merge(safe_merge=True, adapter_names=[adapter])
    merged, layer.weight = layer.weight.data, empty
    return merged


def _write(
    files: list[Path], names: dict[str, str], plan: dict[str, MergedWeight], added: dict[str, Tensor], out: Path
) -> None:
    """Write one merged file for each file of the base, and one for weights that the base lacks."""
    placed: dict[str, str] = {}
    size = 0
    for file in (*files, None):
        weights = added if file is None else _merged_file(file, names, plan)
        if not weights:
            continue
        name = SINGLE if len(files) == 1 and not added else f"model-{len({*placed.values()}) + 1:05d}.safetensors"
        save_file(weights, out / name, metadata={"format": "pt"})
        placed |= dict.fromkeys(weights, name)
        size += sum(weight.numel() * weight.element_size() for weight in weights.values())
    if {*placed.values()} != {SINGLE}:
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _merged_file(file: Path, names: dict[str, str], plan: dict[str, MergedWeight]) -> dict[str, Tensor]:
    """Return the weights of a file; those that the adapter touches are merged in float32 and cast back."""
    weights: dict[str, Tensor] = {}
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118
            name = names.get(key)
            if name is None:
                continue
            weight, new = opened.get_tensor(key), plan.get(name)
            if new is not None:
                merged = new.replacement if new.merge is None else new.merge(weight.float())
                assert merged is not None
                weight = merged.detach().to(weight.dtype)
            weights[name] = weight.contiguous()
    return weights


def _write_configs(base: PreTrainedModel, output: Path) -> None:
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(output)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(output)


def _files(section: ModelSection) -> list[Path]:
    """Return the base's safetensors files; none where its weights have another format."""
    place, gguf_file = source_of(section.base_model, section.gguf_file)
    if gguf_file is not None:
        return []
    folder = Path(place)
    if not folder.is_dir():
        with load_failures("base_model", place, "weights"):
            patterns = ["*.safetensors", "*.json"]
            folder = Path(snapshot_download(place, revision=section.revision, allow_patterns=patterns))
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def _keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _model_name(key: str, in_model: set[str], prefix: str) -> str | None:
    """Return the model's name for a weight in a file, which may have the body's prefix or not."""
    return next((name for name in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")) if name in in_model), None)


def _stay_tied(left: MergedWeight | None, right: MergedWeight | None) -> bool:
    """Return whether two tied weights stay equal: both untouched, or replaced by the same tensor."""
    if left is None or right is None:
        return left is right
    a, b = left.replacement, right.replacement
    return a is not None and b is not None and torch.equal(a, b)
