"""`upweight report`, `upweight watch` and `upweight data`: the page of a run, as a file or live, and of data."""

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
