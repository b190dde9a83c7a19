"""Merge an adapter into the weights it was trained on, and compare the model's outputs before and after."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.log import logger
from upweight.models.adapters.merge_files import merge_by_file
from upweight.models.load import Head, load_config, load_model
from upweight.models.tokenizer import load_tokenizer

HEADS: dict[str, Head] = {"SEQ_CLS": "sequence_score", "TOKEN_CLS": "step_score"}
PROBE_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "Question: what is 12 times 7? Answer: 12 times 7 is 84.",
)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter in a folder, and the base model it was trained on."""

    base: ModelSection
    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "adapter_config.json").is_file():
            raise UserError(f"{self.folder} holds no adapter_config.json: there is no adapter in it")

    def head(self) -> Head:
        """Return the head that the adapter was trained with."""
        return HEADS.get(str(PeftConfig.from_pretrained(str(self.folder)).task_type), "tokens")

    def dtype(self) -> torch.dtype:
        """Return the dtype of the base's weights, or that of training on a GPU where its config has none."""
        stored = load_config(self.base).dtype
        return stored if isinstance(stored, torch.dtype) else torch.float32 if not self.base.bf16 else torch.bfloat16

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of training: the adapter's where it has one, else the base model's."""
        if (self.folder / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(str(self.folder))
        return load_tokenizer(self.base)

    def load(self, dtype: torch.dtype) -> PeftModel:
        """Load the base model in `dtype`, not quantised, with the adapter attached."""
        model = load_model(self.base, dtype, head=self.head(), tokenizer=self.tokenizer(), head_follows=True)
        return PeftModel.from_pretrained(model, str(self.folder))


def merge_adapter(adapted: AdapterFolder, output: Path) -> None:
    """Write the merged model, in the dtype of the base's weights, and the tokenizer to `output`, a new folder."""
    if output.exists():
        raise UserError(f"{output} exists already; remove it, or name another folder with --output")
    if adapted.base.gguf_file is None and hasattr(load_config(adapted.base), "quantization_config"):
        raise UserError("base_model: its weights are stored quantised; name the unquantised model to merge into")
    with atomic_path(output) as part:
        part.mkdir(parents=True)
        tokenizer = adapted.tokenizer()
        reason = merge_by_file(adapted.base, adapted.head(), adapted.folder, len(tokenizer), part)
        if reason is not None:
            logger.info("merging the model as a whole: %s", reason)
            merged = merged_whole(adapted.load(torch.float32))
            nn.Module.to(merged, adapted.dtype())
            merged.config.dtype = adapted.dtype()
            merged.save_pretrained(part)
        tokenizer.save_pretrained(part)


def merged_whole(model: PeftModel) -> PreTrainedModel:
    """Return the merged model; where the adapter changes only one of two tied weights, they are untied."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    head: Any = base.get_output_embeddings()
    tied = head is not None and bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    if tied and not isinstance(head, ModulesToSaveWrapper):
        layer: Any = head.get_base_layer() if isinstance(head, LoraLayer) else head
        layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    tuner: Any = model.base_model
    merged = tuner.merge_and_unload()
    if tied:
        embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        if torch.equal(embedding.weight, head.weight):
            head.weight = embedding.weight
        else:
            merged.config.get_text_config().tie_word_embeddings = False
    return merged


def difference(adapted: AdapterFolder, merged: Path) -> float:
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
