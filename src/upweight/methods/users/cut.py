"""Whether a user's loss depends on which sequences share a micro-batch: tried once, as a run begins."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from upweight.lazy_imports import Tensor, torch
from upweight.log import logger
from upweight.methods.users.function import Call
from upweight.methods.users.terms import CHECKED_CALLS

TOLERANCE = 1e-3  # of the largest term; kernels add in another order for another number of rows

_tried: ContextVar[bool] = ContextVar("tried", default=True)


@contextmanager
def untried_cuts() -> Iterator[None]:
    """Inside, cuts are not tried: `upweight check-method` tries them more thoroughly, and says so itself."""
    token = _tried.set(False)
    try:
        yield
    finally:
        _tried.reset(token)


def warn_if_cut_matters(
    call: Call, values: Mapping[str, Callable[[], Any]], settings: object, term: Tensor, kept: Tensor
) -> None:
    """Warn once, in the first calls, if half of the sequences alone have other terms than among the others.

    `kept` has the shape of the term, and is True where it counts.
    """
    count = len(term)
    if call.cut_tried or call.calls > CHECKED_CALLS or count < 2 or term.device.type == "meta" or not _tried.get():
        return
    scale = torch.where(kept, term.detach(), 0.0).abs().max()
    if not bool(scale > 0):  # as where all advantages are 0: the next micro-batch may tell
        return
    call.cut_tried = True
    with torch.no_grad():
        asked = {name: values[name]() for name in call.asks if name in values}
    for rows in (slice(0, count // 2), slice(count // 2, count)):
        part = {
            name: (lambda value=value, rows=rows: value[rows] if torch.is_tensor(value) and value.ndim else value)
            for name, value in asked.items()
        }
        with torch.no_grad():
            result = call(part, settings)
        call.calls -= 1  # which counts those of the run
        other = result[0] if isinstance(result, tuple) else result
        if other.shape != term[rows].shape:
            return
        gap = torch.where(kept[rows], other - term[rows].detach(), 0.0).abs().max()
        if bool(gap > TOLERANCE * scale):
            logger.warning(WARNING, call.where)
            return


WARNING = (
    "%s returns other terms for the same sequences when fewer are in the micro-batch, so the loss depends on "
    "micro_batch_size and on the number of GPUs. Something is divided by, averaged over or compared with what happens "
    "to be in the same micro-batch, as by mask.sum() or .mean(): return the terms themselves, which are averaged over "
    "the whole step. `upweight check-method` on your file says more"
)
