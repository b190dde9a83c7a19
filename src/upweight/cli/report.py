"""`upweight report` and `upweight watch`: the page of a run, as a file or live."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from upweight.errors import UserError
from upweight.runs.report.page import write_report


def run_report(runs: Sequence[Path], *, output: Path | None, open_it: bool) -> None:
    """Write the page on one run, or on several to compare, and print where it is."""
    path = write_report([_folder(run) for run in runs], output)
    print(path)
    if open_it:
        _open(path.resolve().as_uri())


def run_watch(runs: Sequence[Path], *, port: int | None, open_it: bool) -> None:
    """Serve the page on this machine until Ctrl-C."""
    from upweight.runs.report.live import HERE, serve

    folders = [_folder(run) for run in runs]
    for folder in folders:
        if not folder.exists():
            print(f"{folder}: does not exist yet; its run is shown once it begins", file=sys.stderr)
    with serve(folders, port) as server:
        address = f"http://{HERE}:{server.server_address[1]}/"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        if open_it:
            _open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _folder(run: Path) -> Path:
    """A run's folder, named by itself or by the config that trains it."""
    run = run.expanduser()
    if run.is_file() and run.suffix in (".yaml", ".yml"):
        from upweight.config import load_config

        return Path(load_config(run).run.output_dir)
    if run.is_file():
        raise UserError(f"{run}: name a run's folder (the `output_dir` of its config) or the config itself.")
    return run


def _open(address: str) -> None:
    """Open an address in a browser if there is a display."""
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(address)
