"""A step of a tiny model: packed as trees or padded, in any number of rows and ranks."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from upweight.data.units import units_of
from upweight.doctor.method_check.numbers import loss_of, summed
from upweight.engine import Engine
from upweight.engine.packing import build_batch, count_batch, plan_rows
from upweight.methods.base import Method
from upweight.types import Sample, Unit

VOCABULARY, PROMPTS, PER_PROMPT = 64, 3, 4
HEADS = {
    "tokens": (LlamaForCausalLM, 2),
    "sequence_score": (LlamaForSequenceClassification, 1),
    "step_score": (LlamaForTokenClassification, 2),
}


def tiny_model(method: Method, seed: int) -> PreTrainedModel:
    """Return a model of two layers with random weights and the method's head."""
    torch.manual_seed(seed)
    kind, labels = HEADS[method.head]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    config.num_labels = labels
    return kind(config).eval()


def made_units(method: Method) -> list[Unit]:
    """Return units whose prompts are shared, with what the method's kind of data has."""
    random = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    for number in range(PROMPTS * PER_PROMPT):
        prompt = np.random.default_rng(number // PER_PROMPT).integers(1, VOCABULARY, 4 + number // PER_PROMPT).tolist()
        answers = [random.integers(1, VOCABULARY, 2 + (3 * number + side) % 7).tolist() for side in range(2)]
        row: dict[str, Any] = {"prompt_ids": prompt, "chosen_ids": answers[0], "rejected_ids": answers[1]}
        mask = [False] * len(prompt) + [True] * len(answers[0])
        row |= {"completion_ids": answers[0], "label": number % 2 == 0, "margin": 0.1, "input_ids": prompt + answers[0]}
        key, values = ("labels", np.where(mask, number % 2, -100)) if method.data == "steps" else ("loss_mask", mask)
        rows.append(row | {key: list(values)})
    if not method.online:
        return units_of(rows, method)
    return [Unit((_sampled(row, random),), number // PER_PROMPT) for number, row in enumerate(rows)]


def _sampled(row: dict[str, Any], random: np.random.Generator) -> Sample:
    mask = np.array(row["loss_mask"])
    logps = -3 - random.random(int(mask.sum())).astype(np.float32)
    return Sample(
        np.array(row["input_ids"]), mask, advantage=float(random.normal()), old_logps=logps, sampler_logps=logps + 0.1,
        versions=np.zeros_like(logps), lag=np.ones_like(logps),
    )  # fmt: skip


class ModelStep:
    """A step of units on one model and reference, for any layout, budget, order and number of ranks."""

    def __init__(self, method: Method) -> None:
        self.method, self.units = method, made_units(method)
        self.model, self.reference = tiny_model(method, 1), tiny_model(method, 2)
        # Log-probs of samples are near the model's, so that ratios are near 1.
        if method.online:
            self.units = [replace(unit, samples=tuple(map(self._near, unit.samples))) for unit in self.units]

    def _near(self, sample: Sample) -> Sample:
        ids = torch.from_numpy(sample.ids)[None]
        logps = copy.deepcopy(self.model)(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        scored = logps.gather(1, ids[0, 1:, None])[:, 0].detach().numpy()[sample.loss_mask[1:]]
        shift = 0.05 * np.sin(np.arange(len(scored), dtype=np.float32) * 3)
        return replace(sample, old_logps=scored + shift, sampler_logps=scored + 0.5 * shift)

    def run(
        self, layout: Literal["tree", "padded"], budget: int, ranks: int = 1, order: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the gradient of all weights, end to end."""
        units = [self.units[number] for number in order or range(len(self.units))]
        model, reference = copy.deepcopy(self.model), copy.deepcopy(self.reference)
        engine, predict = Engine(model), self.method.head == "tokens"
        compares = Engine(reference) if self.method.needs_reference else None
        engine.layout = layout
        plan = plan_rows(units, budget, ranks, engine.layout)
        rows = [[units[number] for number in row] for rank in plan for row in rank if row]
        batches = [build_batch(row, engine.layout, predict) for row in rows]
        refs = [None] * len(rows)
        if compares is not None:
            with torch.no_grad():
                refs = [compares(reference, batch).logps_T for batch in batches]

        def outputs(number: int) -> Any:
            out = engine(model, batches[number], self.method.statistics)
            return out if refs[number] is None else replace(out, ref_logps_T=refs[number])

        prepared: dict[str, Tensor] = {}
        if self.method.needs_preparation:
            with torch.no_grad():
                collected = [self.method.collect(outputs(number), batch) for number, batch in enumerate(batches)]
            joined = {name: torch.cat([one[name] for one in collected]) for name in collected[0]}
            prepared = self.method.prepare({name: values[~values.isnan()] for name, values in joined.items()})
        counts = self.method.count(count_batch(units, predict))
        losses = [self.method.loss(outputs(number), batch, prepared) for number, batch in enumerate(batches)]
        total = loss_of(summed(loss.sums for loss in losses), counts)
        gradients = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        return total.detach(), torch.cat([one.flatten() for one in gradients if one is not None])
