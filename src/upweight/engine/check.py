"""Proof on the real model: the first batch against plain forwards of a few sequences; gradients that flow."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from upweight.engine.activation_budget import kept_layers
from upweight.engine.forward import Engine, base_of
from upweight.errors import UserError
from upweight.models.memory import USUAL_OPTIMIZER
from upweight.models.modules import dropout_off
from upweight.types import Batch

_SEQUENCES = 4
_LARGEST_IN_FLOAT32 = 1e-4
# A 30-layer model in bfloat16 differs by 0.06 from itself under another kernel; wrong sharing differs by 0.3 and more.
_MEAN_IN_HALF_PRECISION = 0.15
_COMPARED, _LARGEST_COMPARED = 8, 1 << 25  # weights whose gradients are compared, and how many elements each may have
_TURN_IN_FLOAT32, _TURN_IN_HALF_PRECISION = 1e-4, 0.1  # 1 - cosine


@dataclass(frozen=True)
class Check:
    """How far the engine's log-probs (scores, gradients) lie from those of plain forwards, and how far they may."""

    difference: float
    limit: float
    what: str = "log-probs"

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # a NaN does not pass

    def require(self) -> None:
        """Raise when the difference is too large; for several ranks, on a Check that holds the largest of all."""
        if not self.passed:
            raise UserError(
                f"{self.what} of the first batch differ by {self.difference:.3g} (limit {self.limit:g}) from a plain "
                "forward of the same sequences: this architecture does not share prefixes correctly. "
                "Set `layout: padded` to train it on padded rows."
            )


def check_first_batch(engine: Engine, model: nn.Module, batch: Batch, dtype: torch.dtype | None = None) -> Check:
    """Compare up to 4 sequences of a batch with plain forwards under the stock attention, dropout off.

    `dtype`: what the forward computes in, where that is not the dtype of the weights (mixed precision).
    Every rank runs the same number of forwards, whatever its batch holds.
    """
    sequences = _sequences(batch)
    runs = (sequences + sequences[-1:] * _SEQUENCES)[:_SEQUENCES]
    differences: list[Tensor] = []
    with torch.no_grad(), dropout_off(model):
        out = engine(model, batch)
        found = out.scores_TC if engine.scores else out.logps_T
        assert found is not None
        for sequence in runs:
            plain = _plain_scores(engine, model, sequence) if engine.scores else _plain_logps(model, sequence)
            differences.append((found[sequence.where_T].float() - plain.float()).abs().flatten())
    joined = torch.cat(differences[: len(sequences)])
    if _is_exact(model, dtype or next(iter(model.parameters())).dtype):
        return Check(float(joined.max()), _LARGEST_IN_FLOAT32)
    return Check(float(joined.mean()), _MEAN_IN_HALF_PRECISION)


def check_first_gradients(engine: Engine, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Check:
    """Compare gradients of a few of the lowest trained weights with those through plain forwards, dropout off.

    `model` is not wrapped, and `batch` is small: nothing is recomputed. No weight's `grad` is touched. Whatever lies
    between these weights and the log-probs is part of their gradients, so a few of them tell for all layers.
    """
    weights = [p for p in model.parameters() if p.requires_grad and p.numel() <= _LARGEST_COMPARED][:_COMPARED]
    limit = _TURN_IN_FLOAT32 if _is_exact(model, dtype) else _TURN_IN_HALF_PRECISION
    if not weights:
        return Check(0.0, limit, "gradients")
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
            alone = _plain_scores(engine, model, sequence) if engine.scores else _plain_logps(model, sequence)
            plain += _gradient(alone.float().sum(), weights)
    if not bool(plain.any()) and not bool(ours.any()):
        return Check(0.0, limit, "gradients")
    return Check(1 - float(torch.cosine_similarity(ours, plain, dim=0)), limit, "gradients")


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
    """The first few sequences of a batch that have scored tokens."""
    ids, width = batch.ids_BN.flatten(), batch.ids_BN.shape[1]
    found: list[_Sequence] = []
    for number in batch.sequence_T.unique().tolist()[:_SEQUENCES]:
        where_T = (batch.sequence_T == number).nonzero()[:, 0]
        source_T = batch.source_T[where_T]
        last = int(source_T.max())
        path_N = torch.arange(last // width * width, last + 1, device=ids.device)
        if batch.end_BN is not None:
            path_N = path_N[batch.end_BN.flatten()[path_N] > last]
        found.append(_Sequence(ids[path_N], torch.searchsorted(path_N, source_T), batch.target_T[where_T], where_T))
    return found


def _plain_logps(model: nn.Module, sequence: _Sequence) -> Tensor:
    """Log-probs from the model's own logits."""
    logits_NV = model(input_ids=sequence.ids_N[None], use_cache=False).logits[0]
    return logits_NV[sequence.source_T].float().log_softmax(-1).gather(1, sequence.target_T[:, None])[:, 0]


def _plain_scores(engine: Engine, model: nn.Module, sequence: _Sequence) -> Tensor:
    """Scores of one sequence in a row of its own, under the stock attention."""
    length = len(sequence.ids_N)
    alone = Batch(
        ids_BN=sequence.ids_N[None],
        position_BN=torch.arange(length, device=sequence.ids_N.device)[None],
        end_BN=None,
        length_B=torch.tensor([length], device=sequence.ids_N.device),
        source_T=sequence.source_T,
        target_T=sequence.target_T,
        sequence_T=torch.zeros_like(sequence.source_T),
        num_sequences=1,
    )
    scores = engine(model, alone).scores_TC
    assert scores is not None
    return scores


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
