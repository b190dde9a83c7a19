"""Checks on the real model: the engine against the model's own forward of a few sequences, and flowing gradients."""

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upweight.engine.forward import Engine
from upweight.engine.layout import scaled_beyond
from upweight.engine.packing import Layout
from upweight.engine.scores import without_padding
from upweight.errors import UserError
from upweight.models.modules import dropout_off
from upweight.types import Batch, ImageRef

_FROM_EACH_END = 2  # sequences compared from the start of a batch, and as many from its end
_MOST_SCORED = 256  # tokens compared in a sequence: the logits of a long one are larger than everything else
_LARGEST_IN_FLOAT32 = 1e-4
# A 30-layer model in bfloat16 differs by 0.06 from itself under another kernel; wrong sharing differs by 0.3 and more.
_MEAN_IN_HALF_PRECISION = 0.15
_COMPARED, _LARGEST_COMPARED = 8, 1 << 25  # weights whose gradients are compared, and how many elements each may have
_ADVICE: dict[Layout, str] = {
    "tree": "This architecture does not share prefixes correctly: set `layout: padded`.",
    "padded": "Rows are padded already, and no setting would help: this architecture cannot be trained here yet; "
    "please report it with the model's name.",
}
_NOT_CAUSAL = (
    "They change with the tokens that follow: this model attends in both directions and sees the tokens that it has to "
    "predict. Name a causal language model."
)
_COSINE_IN_FLOAT32, _COSINE_IN_HALF_PRECISION = 1e-4, 0.1  # 1 - cosine similarity of gradients


@dataclass(frozen=True)
class ParityCheck:
    """The difference of log-probs (scores, gradients) between the engine and the model's own forward, and its limit."""

    difference: float
    limit: float
    what: str = "log-probs"
    advice: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # a NaN does not pass

    def require(self) -> None:
        """Raise when the difference is too large; on several ranks, call it on the one with the largest."""
        if not self.passed:
            raise UserError(
                f"{self.what} differ by {self.difference:.3g} (limit {self.limit:g}) from those of the model's own "
                f"forward of the same sequences, one by one. {self.advice}"
            )


def check_first_batch(engine: Engine, model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> ParityCheck:
    """Compare a few sequences of a batch with the model's own forward under its stock attention, dropout off.

    `dtype` is that of the forward in mixed precision. Every rank runs as many forwards, whatever its batch holds.
    """
    sequences = _pick_sequences(batch)
    exact = _is_exact(model, dtype or next(iter(model.parameters())).dtype)
    limit = _LARGEST_IN_FLOAT32 if exact else _MEAN_IN_HALF_PRECISION
    differences: list[Tensor] = []
    with torch.no_grad(), dropout_off(model):
        ours = _engine_output(engine, model, batch)
        for sequence in sequences:
            plain = _model_logps_or_scores(engine, model, sequence)
            differences.append((ours[sequence.where_T].float() - plain.float()).abs().flatten())
        change = None if engine.scores else _change_without_suffix(engine, model, sequences[1])
    # Behind a limit that counts from the row's start, only the last sequences differ: a mean of all would hide them.
    parts = [differences] if engine.scores else [differences[:_FROM_EACH_END], differences[_FROM_EACH_END:]]
    summary = torch.max if exact else torch.mean
    largest = max(float(summary(torch.cat(part))) for part in parts)
    check = ParityCheck(largest, limit, "scores" if engine.scores else "log-probs", _ADVICE[engine.layout])
    causal = check if change is None else ParityCheck(float(summary(change)), limit, "log-probs", _NOT_CAUSAL)
    return check if causal.passed else causal


def _engine_output(engine: Engine, model: nn.Module, batch: Batch) -> Tensor:
    out = engine(model, batch)
    return cast(Tensor, out.scores_TC if engine.scores else out.logps_T)


def check_first_gradients(engine: Engine, model: nn.Module, batch: Batch, dtype: torch.dtype) -> ParityCheck:
    """Compare gradients of a few of the lowest trained weights with those of the model's own forward, dropout off."""
    # `model` is not wrapped, and `batch` is small: nothing is recomputed. No weight's `grad` is changed. All layers
    # between these weights and the log-probs are part of their gradients, so a few weights check all layers.
    weights = [p for p in model.parameters() if p.requires_grad and p.numel() <= _LARGEST_COMPARED][:_COMPARED]
    limit = _COSINE_IN_FLOAT32 if _is_exact(model, dtype) else _COSINE_IN_HALF_PRECISION
    equal = ParityCheck(0.0, limit, "gradients", _ADVICE[engine.layout])
    if not weights:
        return equal
    sequences = _pick_sequences(batch)
    with torch.enable_grad(), dropout_off(model):
        values = _engine_output(engine, model, batch)
        ours = _gradient_of(torch.cat([values[sequence.where_T].flatten() for sequence in sequences]).sum(), weights)
        if engine.context is not None:
            dist.all_reduce(ours, group=engine.context.group)
        plain = torch.zeros_like(ours)
        for sequence in sequences:
            plain += _gradient_of(_model_logps_or_scores(engine, model, sequence).float().sum(), weights)
    if not bool(plain.any()) and not bool(ours.any()):
        return equal
    return dataclasses.replace(equal, difference=1 - float(torch.cosine_similarity(ours, plain, dim=0)))


def _is_exact(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether all is computed in float32; 8-bit layers round activations by what else is in the batch."""
    return dtype in (torch.float32, torch.float64) and all(p.dtype != torch.int8 for p in model.parameters())


def _gradient_of(total: Tensor, weights: list[nn.Parameter]) -> Tensor:
    """Return the gradients of a sum with respect to some weights, concatenated."""
    grads = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.float().flatten() for grad in grads])


@dataclass(frozen=True, eq=False)
class _Sequence:
    """One sequence of a batch: its tokens up to the last source, and its scored tokens."""

    ids_N: Tensor
    source_T: Tensor
    target_T: Tensor
    where_T: Tensor  # its scored tokens in the batch
    images: tuple[ImageRef, ...] = ()
    runs_tower: bool = False  # with or without images, as the forwards of other ranks do


def _pick_sequences(batch: Batch) -> list[_Sequence]:
    """Return the first sequence of a batch, its longest one and its last ones, at least up to their last source."""
    ids, width = batch.ids_BN.flatten(), batch.ids_BN.shape[1]
    last_S = torch.full((batch.num_sequences,), -1, device=ids.device)
    last_S = last_S.scatter_reduce(0, batch.sequence_T, batch.source_T, "amax")
    depth_S = torch.where(last_S < 0, -1, batch.position_BN.flatten()[last_S.clamp(min=0)])
    in_order = [number for number in last_S.argsort().tolist() if last_S[number] >= 0]
    at_end = (in_order[-_FROM_EACH_END:] * _FROM_EACH_END)[:_FROM_EACH_END]  # of few, some twice
    sequences: list[_Sequence] = []
    for number in (in_order[0], int(depth_S.argmax()), *at_end):
        where_T = (batch.sequence_T == number).nonzero()[:, 0]
        last = int(last_S[number])
        first = last // width * width
        length = last + 1 - first if batch.length_B is None else int(batch.length_B[last // width])
        path_N = torch.arange(first, first + length, device=ids.device)
        if batch.end_BN is not None:
            path_N = path_N[batch.end_BN.flatten()[path_N] > last]
        where_T = where_T[torch.linspace(0, len(where_T) - 1, min(len(where_T), _MOST_SCORED)).long()]
        source_T = torch.searchsorted(path_N, batch.source_T[where_T])
        shown = _images_of(batch, path_N), batch.images is not None
        sequences.append(_Sequence(ids[path_N], source_T, batch.target_T[where_T], where_T, *shown))
    return sequences


def _images_of(batch: Batch, path_N: Tensor) -> tuple[ImageRef, ...]:
    """Return the images of a sequence in order, from the positions of its tokens in a batch."""
    if batch.images is None:
        return ()
    refs = batch.images.refs
    of_feature = [number for number, ref in enumerate(refs) for _ in range(ref.tokens)]
    features = batch.images.feature_I[torch.isin(batch.images.at_I, path_N)].tolist()
    images: list[ImageRef] = []
    while features:
        images.append(refs[of_feature[features[0]]])
        features = features[images[-1].tokens :]
    return tuple(images)


def _model_logps_or_scores(engine: Engine, model: nn.Module, sequence: _Sequence) -> Tensor:
    """Return log-probs from the model's logits of one sequence, or its scores."""
    if not engine.scores:
        return _model_logps(engine, model, sequence, len(sequence.ids_N), len(sequence.source_T))
    with without_padding(engine.config):
        scores = _model_scores(engine, model, sequence, len(sequence.ids_N))
        if scores.ndim == 3:
            return scores[0, sequence.source_T]
        last = int(sequence.source_T.max())  # a class that pools scores a text once: the text is cut after each source
        cut = [
            scores if at == last else _model_scores(engine, model, sequence, at + 1)
            for at in sequence.source_T.tolist()
        ]
    return torch.cat(cut)


def _model_scores(engine: Engine, model: nn.Module, sequence: _Sequence, length: int) -> Tensor:
    """Return the scores of the first `length` tokens of a sequence, from the model's own forward."""
    ids_1N = sequence.ids_N[None, :length]
    return model(input_ids=ids_1N, use_cache=False, **_image_inputs(engine, sequence, ids_1N)).logits


def _model_logps(engine: Engine, model: nn.Module, sequence: _Sequence, length: int, scored: int) -> Tensor:
    """Return log-probs of the first `scored` tokens from the model's logits of the first `length` tokens."""
    ids_1N, source_T = sequence.ids_N[None, :length], sequence.source_T[:scored]
    kept = {"logits_to_keep": source_T} if engine.chooses_logits else {}
    images = _image_inputs(engine, sequence, ids_1N)
    logits_NV = model(input_ids=ids_1N, use_cache=False, **kept, **images).logits[0]
    logits_TV = logits_NV if kept else logits_NV[source_T]
    return logits_TV.float().log_softmax(-1).gather(1, sequence.target_T[:scored, None])[:, 0]


def _image_inputs(engine: Engine, sequence: _Sequence, ids_1N: Tensor) -> dict[str, Any]:
    """Return what the model reads of the images of a sequence, whose first tokens are `ids_1N`."""
    if not sequence.runs_tower or engine.images is None:
        return {}
    left, images = int((ids_1N == engine.images.token_id).sum()), []
    for image in sequence.images:
        if left >= image.tokens:
            images.append(image)
            left -= image.tokens
    if not images:
        return {"blank_image": {name: value.to(ids_1N.device) for name, value in engine.images.blank_inputs.items()}}
    return engine.images.plain_inputs([images], ids_1N)


def _change_without_suffix(engine: Engine, model: nn.Module, sequence: _Sequence) -> Tensor:
    """Return how much log-probs in the first half of a sequence change when the second half is cut off."""
    half = len(sequence.source_T) // 2 + 1
    lengths = len(sequence.ids_N), int(sequence.source_T[:half][-1]) + 1
    whole, cut = (_model_logps(engine, model, sequence, length, half) for length in lengths)
    scaled = scaled_beyond(engine.config)  # rotary embeddings of longer sequences differ with each length
    return (whole - cut).abs() * (scaled is None or len(sequence.ids_N) <= scaled)


def gradients_flow(model: nn.Module) -> bool:
    """Return whether any trained weight of this rank has a gradient; call it after a loss that was not zero."""
    grads = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    return any(bool((grad.to_local() if isinstance(grad, DTensor) else grad).any()) for grad in grads)


def require_gradients(flowing: bool, why_zero: str | None = None) -> None:
    """Raise when no rank's weights got a gradient in the first step; `why_zero`: what a loss of exactly 0 means."""
    if not flowing and why_zero is not None:
        raise UserError(why_zero)
    if not flowing:
        raise UserError(
            "the first step left every trained weight without a gradient. With gradient checkpointing, set "
            "`gradient_checkpointing_kwargs: {use_reentrant: false}`; otherwise check which weights are trained."
        )
