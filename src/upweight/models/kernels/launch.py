"""Launch Triton kernels, or compile those of a whole step at the same time before any of them runs."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from upweight.models.modules import context_value

_only_compiling: ContextVar[bool] = ContextVar("only_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel over a grid; inside `only_compiling`, have it compiled instead."""
    if _only_compiling.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def only_compiling() -> Iterator[bool]:
    """Compile the kernels that are launched inside without running them, in threads; yield whether Triton can."""
    import triton  # pyright: ignore[reportMissingImports]

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield False
        return
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool, context_value(_only_compiling, True), mode(pool):
        yield True
