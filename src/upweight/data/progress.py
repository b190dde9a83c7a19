"""Progress bars on stderr, shown only if it is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import datasets


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """Disable the progress bars of `datasets` unless stderr is a terminal."""
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
    """Show a bar over `total` rows; yields a function that takes the rows done since its last call."""
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
