"""`upweight report`, `upweight watch` and `upweight data`: the page of a run, as a file or live, and of data."""

import contextlib
import os
import shutil
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from upweight.cli.arguments import Runs
from upweight.errors import UserError
from upweight.runs.files import holds_run, no_run_in, no_such_run

EVERY_SECONDS = 2.0  # between two looks at a run
CLEAR = "\x1b[2J\x1b[H"  # empties the terminal


def report(
    runs: Runs,
    output: Annotated[Path | None, typer.Option(help="File to write; report.html in the folder otherwise.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a run's page: curves, completions, verdicts; or compare runs."""
    from upweight.runs.report.page import write_report

    path = write_report([run_folder(run) for run in runs], output)
    print(path)
    if open_it:
        open_page(path.resolve().as_uri())


def watch(
    runs: Runs,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; a free one otherwise.")] = None,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the browser.")] = True,
    text: Annotated[bool, typer.Option("--text", help="Show it in this terminal instead.")] = False,
) -> None:
    """Show a run while it trains: its page on this machine only, or text."""
    if text:
        if port is not None:
            raise UserError("--port: --text opens none; leave one of them out")
        watch_text(runs)
    else:
        run_watch(runs, port=port, open_it=open_it)


def watch_text(runs: Sequence[Path]) -> None:
    """Draw runs as text until they have ended or Ctrl-C; where nobody looks (a file, a pipe), once."""
    from upweight.runs.report.page import PageReader
    from upweight.runs.report.text import is_over, text_page

    folders, live = [run_folder(run) for run in runs], sys.stdout.isatty()
    missing = [no_such_run(folder) for folder in folders if not folder.exists()]
    missing += [no_run_in(folder) for folder in folders if folder.exists() and not holds_run(folder)]
    if missing and not live:
        raise UserError("\n".join(missing))
    if missing:
        print("\n".join([*missing, "It is shown once it begins; Ctrl-C ends."]), file=sys.stderr, flush=True)
        while not any(holds_run(folder) for folder in folders):
            time.sleep(EVERY_SECONDS)
    reader = PageReader(folders)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            data = reader.read()
            over = not live or is_over(data)  # the last page stays, whole
            height = None if over else shutil.get_terminal_size().lines
            print((CLEAR if live else "") + text_page(data, height=height), end="", flush=True)
            if over:
                return
            time.sleep(EVERY_SECONDS)


def run_watch(runs: Sequence[Path], *, port: int | None, open_it: bool) -> None:
    """Serve the page on this machine until Ctrl-C."""
    from upweight.runs.report.live import HERE, open_page_server

    folders = [run_folder(run) for run in runs]
    for folder in folders:
        if not folder.exists():
            print(f"{no_such_run(folder)} It is shown once it begins.", file=sys.stderr)
    with open_page_server(folders, port) as server:
        address = f"http://{HERE}:{server.server_address[1]}/"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        if open_it:
            open_page(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def run_data(config: Path, overrides: Sequence[str], *, output: Path | None, open_it: bool) -> None:
    """Write the page about a config's data and show it."""
    from upweight.cli.inputs import load_with_notices
    from upweight.data.page import write_page
    from upweight.data.prepare import preview
    from upweight.models.tokenizer import load_tokenizer

    loaded = load_with_notices(config, list(overrides))
    stages = loaded.stages or (loaded,)
    tokenizer = load_tokenizer(stages[0].model)  # later stages have it from the first
    path = output or Path(stages[0].data.prepared_path).expanduser() / f"data-{config.stem}.html"
    write_page([(stage, preview(stage, tokenizer)) for stage in stages], config.stem, path)
    print(path)
    if open_it:
        open_page(path.resolve().as_uri())


def run_folder(run: Path) -> Path:
    """A run's folder, named by itself or by the config that trains it."""
    run = run.expanduser()
    if run.is_file() and run.suffix in (".yaml", ".yml"):
        from upweight.config import load_config

        return Path(load_config(run).run.output_dir)
    if run.is_file():
        raise UserError(f"{run}: name a run's folder (the `output_dir` of its config) or the config itself.")
    return run


def open_page(address: str) -> None:
    """Open an address in a browser if there is a display."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)
