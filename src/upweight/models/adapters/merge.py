"""Merge an adapter into the weights it was trained on, one file in memory at a time where the files allow it."""

import json
import shlex
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from upweight.config.rules.model import Head
from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.log import logger
from upweight.models.first_look import broken_weights
from upweight.models.load import (
    config_with_head,
    load_failures,
    load_model,
    load_model_config,
    model_without_weights,
    resolve_source,
)
from upweight.models.processor import save_processor, with_processor
from upweight.models.tokenizer import load_tokenizer
from upweight.runs.checkpoints import holds_adapter, merge_is_stale, refuse_damaged, write_merge_source

HEADS: dict[str, Head] = {"SEQ_CLS": "sequence_score", "TOKEN_CLS": "step_score"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PROBE_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "Question: what is 12 times 7? Answer: 12 times 7 is 84.",
)
# How a weight is merged: by a function of the base's weight in float32, or by replacement.
MergedWeight = Callable[[Tensor], Tensor] | Tensor


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter in a folder, and the base model it was trained on."""

    base: ModelSection
    folder: Path

    def __post_init__(self) -> None:
        refuse_damaged(self.folder)
        if not (self.folder / "adapter_config.json").is_file():
            raise UserError(f"{self.folder} holds no adapter_config.json: there is no adapter in it")
        if (broken := broken_weights(self.folder)) is not None:
            raise UserError(f"{self.folder} does not hold a whole adapter: {broken}.")

    def head(self) -> Head:
        """Return the head that the adapter was trained with."""
        return HEADS.get(str(PeftConfig.from_pretrained(str(self.folder)).task_type), "tokens")

    def dtype(self) -> torch.dtype:
        """Return the dtype of the base's weights, or that of training on a GPU where its config has none."""
        stored = load_model_config(self.base).dtype
        return stored if isinstance(stored, torch.dtype) else torch.float32 if not self.base.bf16 else torch.bfloat16

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of training: the adapter's where it has one, else the base model's."""
        if (self.folder / "tokenizer_config.json").is_file():
            return with_processor(AutoTokenizer.from_pretrained(str(self.folder)), self.base, self.folder)
        return load_tokenizer(self.base)

    def load(self, dtype: torch.dtype) -> PeftModel:
        """Load the base model in `dtype`, not quantised, with the adapter attached."""
        model = load_model(self.base, dtype, head=self.head(), tokenizer=self.tokenizer(), head_follows=True)
        return PeftModel.from_pretrained(model, str(self.folder))


def merge_adapter(adapted: AdapterFolder, output: Path) -> None:
    """Write the merged model, in the dtype of the base's weights, and the tokenizer to `output`, new or out of date."""
    stale = output.is_dir() and merge_is_stale(output)
    if output.exists() and not stale:
        other = "remove it, or name another folder with --output"
        if holds_adapter(output, adapted.folder):
            use = f"use it as it is (`upweight inference {shlex.quote(str(output))}`)"
            raise UserError(f"{output} has this adapter in it already: {use}; to merge again, {other}")
        raise UserError(f"{output} exists already; {other}")
    if stale:
        logger.info("%s was merged from an earlier adapter and is written again", output)
    if adapted.base.gguf_file is None and hasattr(load_model_config(adapted.base), "quantization_config"):
        raise UserError("base_model: its weights are stored quantised; name the unquantised model to merge into")
    with atomic_path(output) as part:
        part.mkdir(parents=True)
        tokenizer = adapted.tokenizer()
        reason = merge_by_file(adapted.base, adapted.head(), adapted.folder, len(tokenizer), part)
        if reason is not None:
            logger.info("merging the model as a whole: %s", reason)
            merged = _merged_whole(adapted.load(torch.float32))
            nn.Module.to(merged, adapted.dtype())
            merged.config.dtype = adapted.dtype()
            merged.save_pretrained(part)
        save_processor(tokenizer, str(part))
        write_merge_source(part, adapted.folder)
        if stale:
            shutil.rmtree(output)


def _merged_whole(model: PeftModel) -> PreTrainedModel:
    """Return the merged model; where the adapter changes only one of two tied weights, they are untied."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    head: Any = base.get_output_embeddings()
    tied = head is not None and bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    if tied and not isinstance(head, ModulesToSaveWrapper):
        layer: Any = head.get_base_layer() if isinstance(head, LoraLayer) else head
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    stated = getattr(base.config, "tie_word_embeddings", None)
    tuner: Any = model.base_model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        merged = tuner.merge_and_unload()
    if tied:
        embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        if torch.equal(embedding.weight, head.weight):
            head.weight = embedding.weight
            merged.config.tie_word_embeddings = stated  # PEFT writes False, since the two lay apart while it merged
        else:
            merged.config.get_text_config().tie_word_embeddings = False
    return merged


def merge_by_file(section: ModelSection, head: Head, adapter: Path, tokens: int, output: Path) -> str | None:
    """Write merged weights and config to `output`; return why not, where only the whole model can be merged."""
    files = _base_files(section)
    if not files:
        return "its weights are not in safetensors files"
    config = PeftConfig.from_pretrained(str(adapter))
    if not isinstance(config, LoraConfig) or config.target_parameters or config.bias != "none" or config.lora_bias:
        return "the adapter changes more than the weights of layers"
    base_config = config_with_head(section, head)
    base: Any = model_without_weights(section, head, base_config)
    if tokens > base.get_input_embeddings().num_embeddings:
        return "its vocabulary has grown"
    in_model, tied = set(base.state_dict()), base.get_expanded_tied_weights_keys(all_submodels=True)
    plan = _merged_weights(_with_adapter(base, adapter))
    names = _model_names(files, in_model, base.base_model_prefix)
    in_files = set(names.values())
    replaced = {name: new.detach() for name, new in plan.items() if isinstance(new, Tensor)}
    if in_model - in_files - set(replaced) - set(tied) or not set(plan) <= in_files | set(replaced):
        return "its files have other names for weights than the model"
    if any(not _stay_tied(plan.get(target), plan.get(source)) for target, source in tied.items()):
        return "the adapter changes one of two weights that were tied"
    added = {name: value for name, value in replaced.items() if name not in in_files and name not in tied}
    _write_merged(files, names, plan, added, output)
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(output)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(output)
    return None


def _merged_weights(model: PeftModel) -> dict[str, MergedWeight]:
    """Return how PEFT changes each weight that the adapter touches, by the names of the base model."""
    (adapter,) = model.active_adapters
    plan: dict[str, MergedWeight] = {}
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            weights = module.modules_to_save[adapter].state_dict()
            plan |= {f"{name}.{inner}": value for inner, value in weights.items()}
        elif isinstance(module, LoraLayer) and adapter in module.r:
            plan[f"{name}.weight"] = lambda weight, module=module: _merge_weight(module, weight, adapter)
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


def _merge_weight(module: LoraLayer, weight: Tensor, adapter: str) -> Tensor:
    """Run PEFT's merge of one layer, with the weight put in place for its duration."""
    layer = module.get_base_layer()
    empty, layer.weight = layer.weight, nn.Parameter(weight, requires_grad=False)
    module.merge(safe_merge=True, adapter_names=[adapter])
    merged, layer.weight = layer.weight.data, empty
    return merged


def _write_merged(
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
                merged = new if isinstance(new, Tensor) else new(weight.float())
                weight = merged.detach().to(weight.dtype)
            weights[name] = weight.contiguous()
    return weights


def _base_files(section: ModelSection) -> list[Path]:
    """Return the base's safetensors files; none where its weights have another format."""
    source, gguf_file = resolve_source(section.base_model, section.gguf_file)
    if gguf_file is not None:
        return []
    folder = Path(source)
    if not folder.is_dir():
        with load_failures("base_model", source, "weights"):
            patterns = ["*.safetensors", "*.json"]
            folder = Path(snapshot_download(source, revision=section.revision, allow_patterns=patterns))
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def _model_names(files: list[Path], in_model: set[str], prefix: str) -> dict[str, str]:
    """Return the model's names of weights by those in the files, which may have the body's prefix or not."""
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                spellings = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
                if name := next((name for name in spellings if name in in_model), None):
                    names[key] = name
    return names


def _stay_tied(left: MergedWeight | None, right: MergedWeight | None) -> bool:
    """Return whether two tied weights stay equal: both untouched, or replaced by the same tensor."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return left is None and right is None


def merge_error(adapted: AdapterFolder, merged: Path) -> float:
    """Return the largest change of log-probs (or scores) of a few texts by merging; one model is loaded at a time."""
    tokenizer, dtype, head = adapted.tokenizer(), adapted.dtype(), adapted.head()
    before = _probe_outputs(adapted.load(dtype), tokenizer)
    section = ModelSection(base_model=str(merged), trust_remote_code=adapted.base.trust_remote_code)
    after = _probe_outputs(load_model(section, dtype, head=head), tokenizer)
    return float((before - after).abs().max())


@torch.no_grad()
def _probe_outputs(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return log-probs of the tokens of a few texts, or the scores of a classifier."""
    model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    outputs = []
    for text in PROBE_TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]], device=next(model.parameters()).device)
        logits = model(input_ids=ids).logits.float()
        is_score = logits.shape[-1] < len(tokenizer)
        logps = logits[0, :-1].log_softmax(-1)
        outputs.append(logits.flatten() if is_score else logps.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(outputs).cpu()
