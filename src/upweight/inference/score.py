"""Scores completions with a trained reward model: one score for each, or one for each reasoning step."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from upweight.config.rules.model import ENDINGS, Head
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.config.view import ConfigView
from upweight.data.encode import build_encoder
from upweight.data.images.records import image_refs
from upweight.data.images.row_images import COLUMNS
from upweight.data.raw_row import RowError
from upweight.data.units import units_of
from upweight.engine import Engine
from upweight.engine.packing import build_batch, plan_rows, whole_blocks
from upweight.errors import UserError
from upweight.methods import KTO, PRM
from upweight.models.adapters.merge import AdapterFolder
from upweight.models.load import compute_dtype, load_model, load_model_config
from upweight.models.processor import image_reader
from upweight.models.tokenizer import load_tokenizer
from upweight.types import Sample, Unit

LONGEST_ROW = 4096  # tokens of a forward; a longer sequence has a separate one


class ScoreModel:
    """Scores rows with a reward model; `chat` puts plain texts into the chat template."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        head: Head,
        *,
        data: DataSection | None = None,
        entry: DatasetSpec | None = None,
        chat: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`folder`: where the paths of images in rows begin, beside the working folder."""
        assert head != "tokens", "a language model has no scores"
        self.model, self.head, self.chat = model.eval(), head, chat
        self.engine, self.entry = Engine(model, images=image_reader(tokenizer)), entry or DatasetSpec()
        # An outcome reward model reads a prompt and its answer, which is what labelled rows hold.
        method = KTO() if head == "sequence_score" else PRM()
        folder, data = folder or Path(), data or DataSection()
        self.encoder = build_encoder(data, method, self.entry, 0, tokenizer, ConfigView({}), folder)

    def __call__(self, rows: Sequence[Mapping[str, Any]], first: int = 0) -> list[list[float]]:
        """Return the scores of each row: one, or one for each step; `first` is the first row's number, for messages."""
        units = [self._unit_of_row(row, number) for number, row in enumerate(rows, first)]
        scores: list[list[float]] = [[] for _ in units]
        (plan,) = plan_rows(units, LONGEST_ROW, layout=self.engine.layout)
        device = next(self.model.parameters()).device
        pad_to = whole_blocks if device.type == "cuda" else None
        for numbers in plan:
            batch = build_batch([units[n] for n in numbers], self.engine.layout, predict=False, pad_to=pad_to)
            with torch.no_grad():
                out = self.engine(self.model, batch.to(device))
            assert out.scores_TC is not None
            for sequence, score in zip(batch.sequence_T.tolist(), self._scores(out.scores_TC).tolist(), strict=True):
                scores[numbers[sequence]].append(score)
        return scores

    def steps(self, completion: str) -> list[tuple[str, int]]:
        """Return the steps of a completion that are not blank, each with the number of characters up to its end."""
        separator = self.entry.step_separator or "\n"
        texts = completion.split(separator)
        ends = accumulate(len(text) + len(separator) for text in texts)
        return [(text, end - len(separator)) for text, end in zip(texts, ends, strict=True) if text.strip()]

    def _scores(self, scores_TC: Tensor) -> Tensor:
        """Return an outcome's score unchanged, and the probability of the best class for a step."""
        if self.head == "sequence_score":
            return scores_TC[:, 0]
        return scores_TC[:, 0].sigmoid() if scores_TC.shape[1] == 1 else scores_TC.softmax(-1)[:, -1]

    def _unit_of_row(self, row: Mapping[str, Any], number: int) -> Unit:
        try:
            records = self.encoder(self._training_columns(row))
            if len(records) != 1:  # of a pair
                raise RowError("completion", "one completion; write 'chosen' and 'rejected' as a row each")
        except RowError as error:
            raise UserError(f"row {number}: {error}") from error
        (record,) = records
        if self.head == "step_score":
            (unit,) = units_of([record.columns], self.encoder.setup.method)
            return dataclasses.replace(unit, group=number)
        ids = np.asarray([*record.columns["prompt_ids"], *record.columns["completion_ids"]], np.int64)
        sample = Sample(ids, np.arange(len(ids)) == len(ids) - 1, images=image_refs(record.columns))
        return Unit((sample,), group=number)

    def _training_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row to the columns of training data."""
        prompt, completion = row.get("prompt"), row.get("completion")
        if self.head == "step_score":
            steps = row.get("completions")
            if steps is None and isinstance(completion, str):
                steps = [step for step, _ in self.steps(completion)]
            images = {name: row[name] for name in COLUMNS if name in row} if self.engine.images is not None else {}
            return {"prompt": prompt, "completions": steps, "labels": [0] * len(steps or ()), **images}
        if prompt is None and isinstance(row.get("messages"), list):
            *before, last = row["messages"]
            if self.engine.images is None or not before:
                return {"completion": row["messages"], "label": True}
            prompt, completion = before, [last]  # images are in prompts
        if isinstance(prompt, str) and isinstance(completion, str) and self.chat:
            prompt = [{"role": "user", "content": prompt}]
        return {**row, "prompt": prompt, "completion": completion, "label": True}


def load_score_model(section: ModelSection, adapter: Path | None = None, **options: Any) -> ScoreModel:
    """Load the reward model of a folder or the hub, or an adapter on its base; `options` go to ScoreModel."""
    return ScoreModel(*load_trained(section, adapter, scores=True), **options)


def load_trained(
    section: ModelSection, adapter: Path | None, *, scores: bool
) -> tuple[nn.Module, PreTrainedTokenizerBase, Head]:
    """Load a whole model, or an adapter on its base, on the GPU if there is one; with `scores`, a reward model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, source = compute_dtype(section, device), adapter or section.base_model
    adapted = None if adapter is None else AdapterFolder(section, adapter)
    architecture = (load_model_config(section).architectures or [""])[0]
    heads: list[Head] = [head for head, ending in ENDINGS.items() if architecture.endswith(ending)]
    head = adapted.head() if adapted is not None else heads[0] if heads else "tokens"
    if scores and head == "tokens":
        raise UserError(f"{source} is no reward model: it has no score head. Train one with 'reward_model: true'.")
    if not scores and head != "tokens":
        raise UserError(f"{source} is a reward model: use `upweight score`")
    if adapted is not None:
        model, tokenizer = adapted.load(dtype), adapted.tokenizer()
    else:
        tokenizer = load_tokenizer(section)
        labelled = section.model_copy(update={"num_labels": load_model_config(section).num_labels} if scores else {})
        model = load_model(labelled, dtype, head=head, tokenizer=None if scores else tokenizer)
    nn.Module.to(model, device)
    return model, tokenizer, head
