"""The vocabulary projection at the scored tokens, in chunks recomputed in backward: logits never exist as a whole."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from upweight.engine.divergences import (
    OF_TEACHER,
    ONLY_MEASURED,
    LogitTransform,
    Teacher,
    TeacherStates,
    compared,
    compared_gradient,
    listed,
    listed_gradient,
    softmax_parts,
)
from upweight.models.modules import replaced_forwards
from upweight.types import Divergence

STATISTICS = ("entropy_T", "log_sum_exp_T", "mean_logit_T", "log_collision_T", "is_top_T")
_SCALE_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
# Elements of a chunk, rows times vocabulary: large enough to read the weight seldom, small beside other memory.
_CHUNK_ON_CPU, _CHUNK_ON_GPU = 1 << 24, 1 << 27
# Elements of projections that a forward may keep for its backward, which then need not be recomputed.
_KEPT_ON_CPU, _KEPT_ON_GPU = 1 << 26, 1 << 27
# Statistics that the backward reads, and those that have no gradient.
_KEPT_STATISTICS = (
    "log_sum_exp_T", "entropy_T", "log_collision_T", "divergence_shift_T", "divergence_inner_T", "divergence_norm_T",
    "listed_tail_T",
)  # fmt: skip
_MEASURED = frozenset({"is_top_T"}) | ONLY_MEASURED
_TOKEN_STEP = 128  # on a GPU chunks are padded to this, so that few shapes exist


WITHOUT_TEACHER = Divergence()


@dataclass(frozen=True)
class HeadRequest:
    """What a head computes at each scored token."""

    transform: LogitTransform
    temperature: float = 1.0
    statistics: frozenset[str] = frozenset()
    divergence: Divergence = WITHOUT_TEACHER  # from a teacher, where one is given
    teacher_transform: LogitTransform | None = None  # of its projections; None: it lists tokens

    @property
    def names(self) -> tuple[str, ...]:
        return "logps_T", *sorted(self.statistics)


def logit_transform(base: PreTrainedModel, body: nn.Module) -> LogitTransform | None:
    """Return how this model turns its projection into logits, observed in its forward; None when it does more."""
    # Fixed numbers replace the outputs of the body and the projection, so that no weight is read: this works for models
    # on the meta device and for sharded ones, and costs nothing.
    head, config = base.get_output_embeddings(), base.config.get_text_config()
    assert head is not None
    if not hasattr(config, "hidden_size"):  # several bodies, each with a size of its own
        return None
    hidden_1ND = torch.linspace(-2, 2, 2 * config.hidden_size).view(1, 2, -1)
    projected_1NV = torch.linspace(-40, 40, 2 * config.vocab_size).view(1, 2, -1)
    seen: list[Tensor] = []

    def project(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden.detach())
        return projected_1NV

    try:
        with replaced_forwards({body: HiddenStatesOutput(hidden_1ND), head: project}):
            out = base.forward(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except RuntimeError:  # weights between body and head met our numbers on another device
        return None
    if len(seen) != 1 or seen[0].shape != hidden_1ND.shape:
        return None
    # a model that scales the hidden state before the head scales the logits by as much
    ratio = float((seen[0].float() * hidden_1ND).sum() / (hidden_1ND * hidden_1ND).sum())
    if not torch.allclose(seen[0].float(), hidden_1ND * ratio, rtol=1e-2, atol=1e-2):
        return None
    if abs(ratio - 1) < 1e-2:
        ratio = 1.0
    elif getattr(head, "bias", None) is not None:
        return None
    logits = out.logits.float()
    for transform in _possible_transforms(config):
        if torch.allclose(logits, transform(projected_1NV), rtol=1e-3, atol=1e-3):
            return LogitTransform(transform.scale * ratio, transform.cap)
    return None


class HiddenStatesOutput:
    """Replaces any body output: it has hidden states, and None for every other field. As a forward it gives itself."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __call__(self, *args: Any, **kwargs: Any) -> "HiddenStatesOutput":
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def _possible_transforms(config: Any) -> list[LogitTransform]:
    """Return the transforms that the fields of a config allow."""
    scales = [1.0]
    for name in _SCALE_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales += [float(value), 1 / value]
    cap = getattr(config, "final_logit_softcapping", None)
    caps = [None] if cap is None else [None, float(cap)]
    return [LogitTransform(scale, cap) for scale in scales for cap in caps]


def token_statistics(
    projected_TV: Tensor, target_T: Tensor, request: HeadRequest, teacher: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the log-prob of each target and the requested statistics, in float32 at the temperature.

    `teacher`: its projections of the same tokens, or the ids that it lists.
    """
    raw = request.transform(projected_TV.float())
    policy = softmax_parts(raw, request.temperature)
    out: dict[str, Tensor] = {}
    if teacher is not None and request.teacher_transform is None:
        out = listed(raw, teacher, request.divergence)
    elif teacher is not None and request.teacher_transform is not None:
        how = request.divergence
        student = policy if how.temperature == request.temperature else softmax_parts(raw, how.temperature)
        out = compared(student, request.teacher_transform(teacher.float()), target_T, how)
    logits, shifted_TV, total_T, log_sum_exp_T = policy
    out["logps_T"] = logits.gather(-1, target_T[:, None]).squeeze(-1) - log_sum_exp_T
    out["log_sum_exp_T"] = log_sum_exp_T
    if "entropy_T" in request.statistics:
        out["entropy_T"] = log_sum_exp_T - (shifted_TV * logits).sum(-1) / total_T
    if "mean_logit_T" in request.statistics:
        out["mean_logit_T"] = logits.mean(-1)
    if "log_collision_T" in request.statistics:
        out["log_collision_T"] = (shifted_TV * shifted_TV).sum(-1).log() - 2 * total_T.log()
    if "is_top_T" in request.statistics:
        out["is_top_T"] = logits.argmax(-1) == target_T
    return out


def token_gradient(
    projected_TV: Tensor,
    target_T: Tensor,
    request: HeadRequest,
    known: dict[str, Tensor],
    grads: dict[str, Tensor],
    *,
    teacher: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the projections, from the forward's statistics and the gradients of each of them."""
    capped = request.transform(projected_TV.float())
    grad_TV = None
    if teacher is not None and request.teacher_transform is None:
        grad_TV = listed_gradient(capped, teacher, request.divergence, known, grads)
    elif teacher is not None and request.teacher_transform is not None and "divergence_T" in grads:
        compared_with = request.teacher_transform(teacher.float())
        grad_TV = compared_gradient(capped, compared_with, request.divergence, known, grads["divergence_T"])
    if grad_TV is None or not OF_TEACHER.issuperset(grads):
        rest_TV = _gradient_without_teacher(capped, target_T, request, known, grads)
        grad_TV = rest_TV if grad_TV is None else grad_TV + rest_TV
    if request.transform.cap is not None:
        grad_TV *= 1 - (capped / request.transform.cap) ** 2
    factor = request.transform.scale
    return (grad_TV if factor == 1.0 else grad_TV.mul_(factor)).to(projected_TV.dtype)


def _gradient_without_teacher(
    capped: Tensor, target_T: Tensor, request: HeadRequest, known: dict[str, Tensor], grads: dict[str, Tensor]
) -> Tensor:
    """Return the gradient of the logits from the statistics that need no teacher."""
    logits = capped if request.temperature == 1.0 else capped / request.temperature
    log_p = logits - known["log_sum_exp_T"][:, None]
    p = log_p.exp()
    to_logp = grads.get("logps_T", torch.zeros_like(known["log_sum_exp_T"]))
    weight_T = -to_logp
    if "log_sum_exp_T" in grads:
        weight_T = weight_T + grads["log_sum_exp_T"]
    if "log_collision_T" in grads:
        weight_T = weight_T - 2 * grads["log_collision_T"]
    extra = None
    if "entropy_T" in grads:
        extra = p * (log_p + known["entropy_T"][:, None]) * -grads["entropy_T"][:, None]
    if "log_collision_T" in grads:
        squares = torch.exp(2 * log_p - known["log_collision_T"][:, None]) * (2 * grads["log_collision_T"][:, None])
        extra = squares if extra is None else extra + squares
    if "mean_logit_T" in grads:
        even = grads["mean_logit_T"][:, None] / log_p.shape[-1]
        extra = even if extra is None else extra + even
    grad_TV = p.mul_(weight_T[:, None])
    if extra is not None:
        grad_TV += extra
    if torch.compiler.is_compiling():  # a scatter would not be fused
        column_V = torch.arange(grad_TV.shape[1], device=grad_TV.device)
        grad_TV = torch.where(column_V == target_T[:, None], grad_TV + to_logp[:, None], grad_TV)
    else:
        grad_TV.scatter_add_(1, target_T[:, None], to_logp[:, None])
    return grad_TV if request.temperature == 1.0 else grad_TV.mul_(1 / request.temperature)


def run_head(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return statistics by name for hidden states, `target` ids and a `request`; without one, the stock output."""
    request: HeadRequest | None = kwargs.pop("request", None)
    stock: Callable[..., Tensor] = self.__dict__["_stock_forward"]
    if request is None:
        return stock(hidden, *args, **kwargs)
    target_T: Tensor = kwargs["target"]
    teacher: Teacher | None = kwargs.get("teacher")
    width: int = kwargs["vocabulary"]
    # Rows that pad only one of two vocabularies are no tokens: both are compared on those that they share.
    shared = min(width, teacher.vocabulary) if isinstance(teacher, TeacherStates) else width
    if isinstance(self, nn.Linear) and type(self).forward is nn.Linear.forward:
        weight, bias = self.weight, self.bias
        if shared < width:
            weight, bias = weight[:shared], None if bias is None else bias[:shared]
        return linear_statistics(hidden, weight, bias, target_T, request, teacher=teacher)
    project = (lambda states: stock(states)[:, :shared]) if shared < width else stock
    return module_statistics(project, shared, hidden, target_T, request, teacher=teacher)


def linear_statistics(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    request: HeadRequest,
    *,
    teacher: Teacher | None = None,
) -> dict[str, Tensor]:
    """Compute statistics through a plain linear layer, trained or frozen."""
    kind = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_TD.dtype
    outs = _LinearStatistics.apply(hidden_TD.to(dtype), weight_VD, bias_V, (target_T, request, teacher))
    assert isinstance(outs, tuple)
    return dict(zip(request.names, outs, strict=True))


def module_statistics(
    project: Callable[[Tensor], Tensor],
    vocabulary: int,
    hidden_TD: Tensor,
    target_T: Tensor,
    request: HeadRequest,
    *,
    teacher: Teacher | None = None,
) -> dict[str, Tensor]:
    """Compute statistics through any projection (an adapted or quantized head), each chunk checkpointed."""

    def chunk_statistics(hidden: Tensor, target: Tensor, start: int) -> tuple[Tensor, ...]:
        given = None if teacher is None else teacher.rows(slice(start, start + len(hidden))).values(vocabulary)
        statistics = token_statistics(project(hidden), target, request, given)
        return tuple(statistics[name] for name in request.names)

    chunks = _chunks(hidden_TD, vocabulary * (1 if teacher is None else 2), hidden_TD, target_T)
    starts = range(0, len(hidden_TD), max(1, len(chunks[0][0])))
    parts = [
        checkpoint(chunk_statistics, hidden, target, start, use_reentrant=False)
        for hidden, target, start in zip(*chunks, starts or [0], strict=True)
    ]
    return {name: torch.cat(column) for name, column in zip(request.names, zip(*parts, strict=True), strict=True)}


def _chunks(like: Tensor, width: int, *rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Split each tensor into the same chunks of rows, such that a chunk of projections stays within its limit."""
    return [x.split(chunk_rows(like, width)) for x in rows]


def chunk_rows(like: Tensor, width: int) -> int:
    """Return how many rows of so many columns a chunk on this device holds."""
    limit = _CHUNK_ON_GPU if like.is_cuda else _CHUNK_ON_CPU
    count = max(1, limit // width)
    return max(_TOKEN_STEP, count // _TOKEN_STEP * _TOKEN_STEP) if like.is_cuda else count


class _LinearStatistics(torch.autograd.Function):
    """Keeps hidden states, per-row statistics and a bounded part of the projections; backward recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        target_T, request, teacher = targets
        project = _projection(hidden_TD, weight_VD, bias_V)
        kernel = _maybe_compiled(token_statistics, hidden_TD.is_cuda)
        parts: dict[str, list[Tensor]] = {}
        budget = (_KEPT_ON_GPU if hidden_TD.is_cuda else _KEPT_ON_CPU) if any(ctx.needs_input_grad) else 0
        ctx.projected, ctx.teacher, ctx.width = [], teacher, len(weight_VD) * (1 if teacher is None else 2)
        start = 0
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for hidden, target in zip(*_chunks(hidden_TD, ctx.width, hidden_TD, target_T), strict=True):
                projected = project(_pad_rows(hidden))
                given = _given(teacher, start, len(hidden), len(weight_VD))
                for name, value in kernel(projected, _pad_rows(target), request, given).items():
                    parts.setdefault(name, []).append(value[: len(hidden)])
                budget -= projected.numel() * (1 if teacher is None else 2)
                if budget >= 0:
                    ctx.projected.append((projected, given))
                start += len(hidden)
        statistics = {name: torch.cat(values) for name, values in parts.items()}
        kept = [name for name in _KEPT_STATISTICS if name in statistics]
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T, *(statistics[name] for name in kept))
        ctx.request, ctx.kept = request, kept
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(statistics[name] for name in _MEASURED if name in request.names))
        return tuple(statistics[name] for name in request.names)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, target_T, *kept = ctx.saved_tensors
        reached = {name: grad for name, grad in zip(ctx.request.names, grad_outputs, strict=True) if grad is not None}
        for name in _MEASURED:
            reached.pop(name, None)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        project = _projection(hidden_TD, weight_VD, bias_V)
        weight = weight_VD.to(hidden_TD.dtype)
        kernel = _maybe_compiled(token_gradient, hidden_TD.is_cuda)
        grad_hidden = torch.empty_like(hidden_TD) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias else None
        columns = [hidden_TD, target_T, *kept, *reached.values()]
        start = 0
        # The forward chose the dtypes, which autocast would change.
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for hidden, target, *rest in zip(*_chunks(hidden_TD, ctx.width, *columns), strict=True):
                rows = len(hidden)
                values = [_pad_rows(value) for value in rest]
                statistics = dict(zip(ctx.kept, values, strict=False))
                grads = dict(zip(reached, values[len(kept) :], strict=True))
                if ctx.projected:
                    projected, given = ctx.projected.pop(0)
                else:
                    projected = project(_pad_rows(hidden))
                    given = _given(ctx.teacher, start, rows, len(weight_VD))
                grad_TV = kernel(projected, _pad_rows(target), ctx.request, statistics, grads, teacher=given)[:rows]
                if grad_hidden is not None:
                    torch.mm(grad_TV, weight, out=grad_hidden[start : start + rows])
                if grad_weight is not None:
                    _add_product(grad_weight, grad_TV, hidden)
                if grad_bias is not None:
                    grad_bias += grad_TV.sum(0, dtype=torch.float32)
                start += rows
        to_weight = None if grad_weight is None else grad_weight.to(weight_VD.dtype)
        to_bias = None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype)
        return grad_hidden, to_weight, to_bias, None


def _given(teacher: Teacher | None, start: int, rows: int, columns: int) -> Tensor | None:
    """Return what a teacher gives for a chunk of scored tokens."""
    return None if teacher is None else _pad_rows(teacher.rows(slice(start, start + rows)).values(columns))


def _projection(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return the linear layer in the dtype of the hidden states."""
    weight = weight_VD.to(hidden_TD.dtype)
    bias = None if bias_V is None else bias_V.to(hidden_TD.dtype)
    return lambda hidden: F.linear(hidden, weight, bias)


def _add_product(total_VD: Tensor, grad_TV: Tensor, hidden_TD: Tensor) -> None:
    """total += grad^T hidden, the sum in float32."""
    if total_VD.dtype == grad_TV.dtype:
        total_VD.addmm_(grad_TV.t(), hidden_TD)
    elif total_VD.is_cuda:
        torch.addmm(total_VD, grad_TV.t(), hidden_TD, out_dtype=total_VD.dtype, out=total_VD)
    else:
        total_VD += grad_TV.t() @ hidden_TD


def _pad_rows(rows: Tensor) -> Tensor:
    """On a GPU, pad rows with zeros to a multiple of the step."""
    missing = -len(rows) % _TOKEN_STEP if rows.is_cuda else 0
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


@functools.cache
def _maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return a row function, or its compiled form: eager passes over a chunk cost as much as its projection."""
    return torch.compile(function, dynamic=True, fullgraph=True) if compiled else function
