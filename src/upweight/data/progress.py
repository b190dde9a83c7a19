"""Progress on stderr where someone watches, silence elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import datasets


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """Keep the bars of `datasets` off stderr unless it is a terminal."""
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` rows; the function it gives is called with the rows done since the last call."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, advance=done)
