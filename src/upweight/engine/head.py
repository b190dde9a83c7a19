"""The head at the scored tokens, in chunks of rows: logits never exist as a whole."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from upweight.engine.divergences import ONLY_MEASURED, Teacher, TeacherStates
from upweight.engine.logits import HeadRequest, token_gradient, token_statistics
from upweight.engine.outcomes import Outcomes
from upweight.models.memory import free_memory

# Elements of a chunk, rows times vocabulary: large enough to read the weight seldom, small beside other memory.
_CHUNK_ON_CPU, _CHUNK_ON_GPU = 1 << 24, 1 << 27
# Elements of projections that a forward may keep for its backward, which then need not be recomputed; on a GPU it may
# be more, by a share of the memory that is free then, since the head's backward gives it back before all others run.
_KEPT_ON_CPU, _KEPT_ON_GPU, _KEPT_SHARE = 1 << 26, 1 << 27, 1 / 16
# Statistics that the backward reads, and those that have no gradient.
_KEPT_STATISTICS = (
    "log_sum_exp_T", "entropy_T", "log_collision_T", "divergence_shift_T", "divergence_inner_T", "divergence_norm_T",
    "listed_tail_T",
)  # fmt: skip
_MEASURED = frozenset({"is_top_T"}) | ONLY_MEASURED
_TOKEN_STEP = 128  # on a GPU chunks are padded to this, so that few shapes exist


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
    shared = width
    if isinstance(teacher, TeacherStates) and teacher.matched is None:
        shared = min(width, teacher.vocabulary)
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
        statistics = token_statistics(project(hidden), target, request, given, _outcomes(teacher))
        return tuple(statistics[name] for name in request.names)

    chunks = _chunks(request, _chunk_width(vocabulary, teacher), hidden_TD, target_T)
    starts = range(0, len(hidden_TD), max(1, len(chunks[0][0])))
    parts = [
        checkpoint(chunk_statistics, hidden, target, start, use_reentrant=False)
        for hidden, target, start in zip(*chunks, starts or [0], strict=True)
    ]
    return {name: torch.cat(column) for name, column in zip(request.names, zip(*parts, strict=True), strict=True)}


def _chunks(request: HeadRequest, width: int, *rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Split each tensor into the same chunks of rows, such that a chunk of projections stays within its limit."""
    return [x.split(chunk_rows(rows[0], width, request.chunk_tokens)) for x in rows]


def chunk_rows(like: Tensor, width: int, most: int | None = None) -> int:
    """Return how many rows of so many columns a chunk on this device holds."""
    limit = _CHUNK_ON_GPU if like.is_cuda else _CHUNK_ON_CPU
    count = max(1, limit // width)
    count = count if most is None else min(count, most)
    return max(_TOKEN_STEP, count // _TOKEN_STEP * _TOKEN_STEP) if like.is_cuda else count


def _kept_elements(like: Tensor) -> int:
    """Return how many elements of projections in a tensor's dtype may be kept for the backward."""
    if not like.is_cuda:
        return _KEPT_ON_CPU
    return max(_KEPT_ON_GPU, int(_KEPT_SHARE * free_memory(like.device) / like.element_size()))


class _LinearStatistics(torch.autograd.Function):
    """Keeps hidden states, per-row statistics and a bounded part of the projections; backward recomputes the rest.

    The gradient of a divergence that a loss sums up is known but for a factor: the forward takes it, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        target_T, request, teacher = targets
        project = _projection(hidden_TD, weight_VD, bias_V)
        kernel, needed = _maybe_compiled(token_statistics, hidden_TD.is_cuda), ctx.needs_input_grad[:3]
        summed = request.divergence.summed and isinstance(teacher, TeacherStates) and any(needed)
        ctx.gradients = _HeadGradients(hidden_TD, weight_VD, bias_V, needed) if summed else None
        parts: dict[str, list[Tensor]] = {}
        keeps = any(needed) and not summed and request.chunk_tokens is None
        budget = _kept_elements(hidden_TD) if keeps else 0
        ctx.projected, ctx.teacher, ctx.width = [], teacher, _chunk_width(len(weight_VD), teacher)
        outcomes = _outcomes(teacher)
        start = 0
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for hidden, target in zip(*_chunks(request, ctx.width, hidden_TD, target_T), strict=True):
                projected, padded = project(_pad_rows(hidden)), _pad_rows(target)
                given = _given(teacher, start, len(hidden), len(weight_VD))
                statistics = kernel(projected, padded, request, given, outcomes)
                for name, value in statistics.items():
                    parts.setdefault(name, []).append(value[: len(hidden)])
                if ctx.gradients is not None:
                    to_sum = {"divergence_T": torch.ones_like(statistics["divergence_T"])}
                    ctx.gradients.add(hidden, (projected, padded, given, outcomes), request, statistics, to_sum)
                budget -= projected.numel() + (0 if given is None else given.numel())
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
        if ctx.gradients is not None and set(reached) == {"divergence_T"} and len(hidden_TD):
            gradients, ctx.gradients = ctx.gradients, None  # once: they are scaled in place
            return *gradients.scaled(reached["divergence_T"][0]), None
        project = _projection(hidden_TD, weight_VD, bias_V)
        gradients = _HeadGradients(hidden_TD, weight_VD, bias_V, ctx.needs_input_grad[:3])
        columns = [hidden_TD, target_T, *kept, *reached.values()]
        start = 0
        # The forward chose the dtypes, which autocast would change.
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for hidden, target, *rest in zip(*_chunks(ctx.request, ctx.width, *columns), strict=True):
                values = [_pad_rows(value) for value in rest]
                statistics = dict(zip(ctx.kept, values, strict=False))
                grads = dict(zip(reached, values[len(kept) :], strict=True))
                if ctx.projected:
                    projected, given = ctx.projected.pop(0)
                else:
                    projected = project(_pad_rows(hidden))
                    given = _given(ctx.teacher, start, len(hidden), len(weight_VD))
                inputs = projected, _pad_rows(target), given, _outcomes(ctx.teacher)
                gradients.add(hidden, inputs, ctx.request, statistics, grads)
                start += len(hidden)
        return *gradients.scaled(None), None


class _HeadGradients:
    """The gradients of a head's inputs and weights, added up chunk by chunk; sums in float32."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> None:
        zeros = functools.partial(torch.zeros_like, dtype=torch.float32)
        self.hidden_TD = torch.empty_like(hidden_TD) if needed[0] else None
        self.weight_VD = zeros(weight_VD) if needed[1] else None
        self.bias_V = zeros(bias_V) if needed[2] and bias_V is not None else None
        self._weight = weight_VD.to(hidden_TD.dtype)
        self._dtypes = [hidden_TD.dtype, weight_VD.dtype, weight_VD.dtype if bias_V is None else bias_V.dtype]
        self._kernel, self._start = _maybe_compiled(token_gradient, hidden_TD.is_cuda), 0

    def add(
        self,
        hidden: Tensor,
        # projections, targets and what the teacher gives, padded; and what tokens are compared as
        inputs: tuple[Tensor, Tensor, Tensor | None, Outcomes | None],
        request: HeadRequest,
        statistics: dict[str, Tensor],
        grads: dict[str, Tensor],
    ) -> None:
        """Add the next chunk's part, from its statistics and the gradients of each of them."""
        projected, target, given, outcomes = inputs
        kept = {name: statistics[name] for name in _KEPT_STATISTICS if name in statistics}
        rows = slice(self._start, self._start + len(hidden))
        grad_TV = self._kernel(projected, target, request, kept, grads, teacher=given, outcomes=outcomes)
        grad_TV = grad_TV[: len(hidden)]
        if self.hidden_TD is not None:
            torch.mm(grad_TV, self._weight, out=self.hidden_TD[rows])
        if self.weight_VD is not None:
            _add_product(self.weight_VD, grad_TV, hidden)
        if self.bias_V is not None:
            self.bias_V += grad_TV.sum(0, dtype=torch.float32)
        self._start = rows.stop

    def scaled(self, factor: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight and bias, times a factor, each in its dtype."""
        sums = [self.hidden_TD, self.weight_VD, self.bias_V]
        if factor is not None:
            sums = [None if one is None else one.mul_(factor) for one in sums]
        return [None if one is None else one.to(dtype) for one, dtype in zip(sums, self._dtypes, strict=True)]


def _given(teacher: Teacher | None, start: int, rows: int, columns: int) -> Tensor | None:
    """Return what a teacher gives for a chunk of scored tokens."""
    return None if teacher is None else _pad_rows(teacher.rows(slice(start, start + rows)).values(columns))


def _outcomes(teacher: Teacher | None) -> Outcomes | None:
    """Return what the student's tokens are compared as, where a teacher has another vocabulary."""
    matched = teacher.matched if isinstance(teacher, TeacherStates) else None
    return None if matched is None else matched.student


def _chunk_width(columns: int, teacher: Teacher | None) -> int:
    """Return how many numbers a chunk holds for each scored token, projections of both models together."""
    if isinstance(teacher, TeacherStates) and teacher.matched is not None:
        return columns + teacher.chunk_width
    return columns * (1 if teacher is None else 2)


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
