"""Proof on the real model: a batch against the model's own forwards of a few sequences; gradients that flow."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upweight.engine.activation_budget import kept_layers
from upweight.engine.forward import Engine, base_of
from upweight.engine.layout import scaled_beyond
from upweight.engine.packing import Layout
from upweight.engine.scores import without_padding
from upweight.errors import UserError
from upweight.models.memory import USUAL_OPTIMIZER
from upweight.models.modules import dropout_off
from upweight.types import Batch

_EITHER_END = 2  # sequences from the start of a batch, and as many of those that lie furthest behind
_MOST_SCORED = 256  # tokens of a sequence that are compared: the logits of a long one are larger than all else
_LARGEST_IN_FLOAT32 = 1e-4
# A 30-layer model in bfloat16 differs by 0.06 from itself under another kernel; wrong sharing differs by 0.3 and more.
_MEAN_IN_HALF_PRECISION = 0.15
_COMPARED, _LARGEST_COMPARED = 8, 1 << 25  # weights whose gradients are compared, and how many elements each may have
_ADVICE: dict[Layout, str] = {
    "tree": "This architecture does not share prefixes correctly: set `layout: padded`, in scripts `layout='padded'`.",
    "padded": "Rows are padded already, and no setting would help: this architecture cannot be trained here yet; "
    "please report it with the model's name.",
}
_PEEKS = (
    "They change with the tokens that follow: this model reads texts both ways, so that it knows what it is asked to "
    "predict. Name a causal language model."
)
_TURN_IN_FLOAT32, _TURN_IN_HALF_PRECISION = 1e-4, 0.1  # 1 - cosine


@dataclass(frozen=True)
class Check:
    """How far the engine's log-probs (scores, gradients) lie from those of plain forwards, and how far they may."""

    difference: float
    limit: float
    what: str = "log-probs"
    advice: str = ""

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # a NaN does not pass

    def require(self) -> None:
        """Raise when the difference is too large; for several ranks, on a Check that holds the largest of all."""
        if not self.passed:
            raise UserError(
                f"{self.what} differ by {self.difference:.3g} (limit {self.limit:g}) from those of the model's own "
                f"forward of the same sequences, one by one. {self.advice}"
            )


def check_first_batch(engine: Engine, model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Check:
    """Compare a few sequences of a batch with the model's own forwards under the stock attention, dropout off.

    `dtype`: what the forward computes in, where that is not the dtype of the weights (mixed precision).
    Every rank runs the same number of forwards, whatever its batch holds.
    """
    sequences = _sequences(batch)
    exact = _is_exact(model, dtype or next(iter(model.parameters())).dtype)
    limit = _LARGEST_IN_FLOAT32 if exact else _MEAN_IN_HALF_PRECISION
    differences: list[Tensor] = []
    with torch.no_grad(), dropout_off(model):
        out = engine(model, batch)
        ours = out.scores_TC if engine.scores else out.logps_T
        assert ours is not None
        for sequence in sequences:
            plain = _plain(engine, model, sequence)
            differences.append((ours[sequence.where_T].float() - plain.float()).abs().flatten())
        peeks = None if engine.scores else _peeks(engine, model, sequences[1])
    # Behind a limit that counts from the row's start, only the last sequences differ: a mean of all would hide them.
    parts = [differences] if engine.scores else [differences[:_EITHER_END], differences[_EITHER_END:]]
    worst = max(_difference(torch.cat(part), exact) for part in parts)
    check = Check(worst, limit, "scores" if engine.scores else "log-probs", _ADVICE[engine.layout])
    peeking = check if peeks is None else Check(_difference(peeks, exact), limit, "log-probs", _PEEKS)
    return check if peeking.passed else peeking


def _difference(values: Tensor, exact: bool) -> float:
    return float(values.max() if exact else values.mean())


def check_first_gradients(engine: Engine, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Check:
    """Compare gradients of a few of the lowest trained weights with those through plain forwards, dropout off.

    `model` is not wrapped, and `batch` is small: nothing is recomputed. No weight's `grad` is touched. Whatever lies
    between these weights and the log-probs is part of their gradients, so a few of them tell for all layers.
    """
    weights = [p for p in model.parameters() if p.requires_grad and p.numel() <= _LARGEST_COMPARED][:_COMPARED]
    limit = _TURN_IN_FLOAT32 if _is_exact(model, dtype) else _TURN_IN_HALF_PRECISION
    nothing = Check(0.0, limit, "gradients", _ADVICE[engine.layout])
    if not weights:
        return nothing
    sequences = _sequences(batch)
    with torch.enable_grad(), dropout_off(model):
        out = engine(model, batch)
        found = out.scores_TC if engine.scores else out.logps_T
        assert found is not None
        ours = _gradient(torch.cat([found[sequence.where_T].flatten() for sequence in sequences]).sum(), weights)
        if engine.context is not None:
            ours = engine.context.summed(ours)
        plain = torch.zeros_like(ours)
        for sequence in sequences:
            plain += _gradient(_plain(engine, model, sequence).float().sum(), weights)
    if not bool(plain.any()) and not bool(ours.any()):
        return nothing
    return dataclasses.replace(nothing, difference=1 - float(torch.cosine_similarity(ours, plain, dim=0)))


def _is_exact(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether nothing is rounded but to float32; 8-bit layers round activations by what else is in the batch."""
    return dtype in (torch.float32, torch.float64) and all(p.dtype != torch.int8 for p in model.parameters())


def _gradient(total: Tensor, weights: list[nn.Parameter]) -> Tensor:
    """The gradients of a sum with respect to some weights, laid end to end."""
    found = torch.autograd.grad(total, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.float().flatten() for grad in found])


@dataclass(frozen=True, eq=False)
class _Sequence:
    """One sequence of a batch on its own: its tokens up to the last source, and its scored tokens."""

    ids_N: Tensor
    source_T: Tensor
    target_T: Tensor
    where_T: Tensor  # its scored tokens in the batch


def _sequences(batch: Batch) -> list[_Sequence]:
    """As many sequences of a batch from its start as of those furthest behind, at least up to their last source.

    The longest takes the place of a second one at the start; a batch of fewer gives some of them twice.
    """
    ids, width = batch.ids_BN.flatten(), batch.ids_BN.shape[1]
    last_S = torch.full((batch.num_sequences,), -1, device=ids.device)
    last_S = last_S.scatter_reduce(0, batch.sequence_T, batch.source_T, "amax")
    depth_S = torch.where(last_S < 0, -1, batch.position_BN.flatten()[last_S.clamp(min=0)])
    behind = [number for number in last_S.argsort().tolist() if last_S[number] >= 0]
    numbers = [behind[0], int(depth_S.argmax()), *(behind[-_EITHER_END:] * _EITHER_END)[:_EITHER_END]]
    found: list[_Sequence] = []
    for number in numbers:
        where_T = (batch.sequence_T == number).nonzero()[:, 0]
        last = int(last_S[number])
        first = last // width * width
        length = last + 1 - first if batch.length_B is None else int(batch.length_B[last // width])
        path_N = torch.arange(first, first + length, device=ids.device)
        if batch.end_BN is not None:
            path_N = path_N[batch.end_BN.flatten()[path_N] > last]
        where_T = where_T[torch.linspace(0, len(where_T) - 1, min(len(where_T), _MOST_SCORED)).long()]
        source_T = torch.searchsorted(path_N, batch.source_T[where_T])
        found.append(_Sequence(ids[path_N], source_T, batch.target_T[where_T], where_T))
    return found


def _plain(engine: Engine, model: nn.Module, sequence: _Sequence) -> Tensor:
    """What the model itself makes of one sequence: log-probs from its logits, or scores."""
    if engine.scores:
        return _plain_scores(engine, model, sequence)
    return _plain_logps(engine, model, sequence.ids_N, sequence.source_T, sequence.target_T)


def _plain_logps(engine: Engine, model: nn.Module, ids_N: Tensor, source_T: Tensor, target_T: Tensor) -> Tensor:
    """Log-probs from the model's own logits, of which no others are asked for where it can choose."""
    chosen = {"logits_to_keep": source_T} if engine.chooses_logits else {}
    logits_NV = model(input_ids=ids_N[None], use_cache=False, **chosen).logits[0]
    logits_TV = logits_NV if chosen else logits_NV[source_T]
    return logits_TV.float().log_softmax(-1).gather(1, target_T[:, None])[:, 0]


def _peeks(engine: Engine, model: nn.Module, sequence: _Sequence) -> Tensor:
    """How log-probs in the first half of a sequence change when the other half is cut off."""
    half = len(sequence.source_T) // 2 + 1
    source_T, target_T = sequence.source_T[:half], sequence.target_T[:half]
    cut_N = sequence.ids_N[: int(source_T[-1]) + 1]
    whole, cut = (_plain_logps(engine, model, ids, source_T, target_T) for ids in (sequence.ids_N, cut_N))
    scaled = scaled_beyond(engine.config)  # longer sequences have other positions, and no two lengths agree
    return (whole - cut).abs() * (scaled is None or len(sequence.ids_N) <= scaled)


def _plain_scores(engine: Engine, model: nn.Module, sequence: _Sequence) -> Tensor:
    """The model's own scores; a class that pools gives one of each text, so the text is cut after the position."""
    with without_padding(engine.config):
        scores = model(input_ids=sequence.ids_N[None], use_cache=False).logits
        if scores.ndim == 3:
            return scores[0, sequence.source_T]
        last = int(sequence.source_T.max())
        cut = [
            scores if at == last else model(input_ids=sequence.ids_N[None, : at + 1], use_cache=False).logits
            for at in sequence.source_T.tolist()
        ]
    return torch.cat(cut)


def enable_checkpointing(
    model: nn.Module, reentrant: bool = False, every_layer: bool = False, optimizer: str = USUAL_OPTIMIZER
) -> None:
    """Recompute activations in backward, in `every_layer` or in as many as memory, the optimizer's aside, asks for.

    Frozen embeddings then have to pass gradients on, or adapters get none.
    """
    base = base_of(model)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    base.__dict__["_kept_layers"] = None if every_layer else kept_layers(base, optimizer)
    if not any(p.requires_grad for p in base.get_input_embeddings().parameters()):
        base.enable_input_require_grads()


def gradients_flow(model: nn.Module) -> bool:
    """Whether a backward left something in any trained weight of this rank; ask after a loss that was not zero."""
    found = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    return any(bool((grad.to_local() if isinstance(grad, DTensor) else grad).any()) for grad in found)


def require_gradients(flowing: bool) -> None:
    """Raise when no rank's weights got a gradient in the first step."""
    if not flowing:
        raise UserError(
            "the first step left every trained weight without a gradient. With gradient checkpointing, set "
            "`gradient_checkpointing_kwargs: {use_reentrant: false}`; otherwise check which weights are trained."
        )
