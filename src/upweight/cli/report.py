"""`upweight report` and `upweight watch`: the page of a run, as a file or live."""

import contextlib
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from upweight.errors import UserError
from upweight.runs.report.live import HERE, open_page_server


def run_watch(runs: Sequence[Path], *, port: int | None, open_it: bool) -> None:
    """Serve the page on this machine until Ctrl-C."""
    folders = [run_folder(run) for run in runs]
    for folder in folders:
        if not folder.exists():
            print(f"{folder}: does not exist yet; its run is shown once it begins", file=sys.stderr)
    with open_page_server(folders, port) as server:
        address = f"http://{HERE}:{server.server_address[1]}/"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        if open_it:
            open_page(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


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
