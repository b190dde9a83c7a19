"""Builds one self-contained HTML page from runs, with styles, scripts and data in it."""

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.files import write_text
from upweight.runs.files import REPORT, holds_run, no_run_in, no_such_run
from upweight.runs.health import RULES
from upweight.runs.report.charts import GROUPS, charts_of
from upweight.runs.report.run import RunReader, folders_of
from upweight.version import __version__

STYLES = ("uplot/uPlot.min.css", "page.css")
SCRIPTS = ("uplot/uPlot.iife.min.js", "dom.js", "charts.js", "spreads.js", "completions.js", "sections.js", "main.js")
COMPARISON = "comparison.html"
GENERIC = {"out", "output", "outputs", "run", "model"}  # folder names that do not identify a run


class PageReader:
    """Reads the data of a page: one run, the stages of one, or several runs to compare."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.readers: dict[Path, RunReader] = {}

    def read(self, *, live: bool = False) -> dict[str, Any]:
        """Return the data of the page."""
        parts = [part for folder in self.folders for part in folders_of(folder)]
        readers = [self.readers.setdefault(part, RunReader(part)) for part in parts]
        names = _distinct_names(parts)
        runs = [reader.read(name) for reader, name in zip(readers, names, strict=True)]
        trained, evaluated = ([name for run in runs for name in run[kind]] for kind in ("metrics", "evaluated"))
        return {
            "title": _distinct_names(self.folders)[0] if len(self.folders) == 1 else " and ".join(names),
            "kind": "comparison" if len(self.folders) > 1 else "stages" if len(parts) > len(self.folders) else "run",
            "live": live,
            "version": __version__,
            "made": time.time(),
            "rules": len(RULES),
            "groups": [*GROUPS, "Other"],
            "charts": [vars(chart) for chart in charts_of(trained, evaluated)],
            "runs": runs,
        }


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of one run, or of several to compare, and return its path."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(no_such_run(folder))
        if not holds_run(folder):
            raise UserError(no_run_in(folder))
    path = output or folders[0] / (REPORT if len(folders) == 1 else COMPARISON)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(PageReader(folders).read()))
    return path


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML of the page; with `live` in its data it polls its server."""
    styles, scripts = ([_read_asset(name) for name in names] for names in (STYLES, SCRIPTS))
    connect = "'self'" if data.get("live") else "'none'"
    policy = (
        f"default-src 'none'; style-src {' '.join(map(_hash, styles))}; script-src {' '.join(map(_hash, scripts))}; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": html.escape(policy),
        "TITLE": html.escape(f"{data['title']} · Upweight"),
        "STYLES": "\n".join(f"<style>{style}</style>" for style in styles),
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts),
        "DATA": embedded(data),
    }
    return _filled("page.html", parts)


def plain_page(title: str, body: str) -> str:
    """Return the HTML of a page without scripts; `body` is markup."""
    style = _read_asset("page.css")
    policy = f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    parts = {"POLICY": html.escape(policy), "TITLE": html.escape(f"{title} · Upweight")}
    return _filled("plain.html", {**parts, "STYLES": f"<style>{style}</style>", "BODY": body})


def _filled(name: str, parts: Mapping[str, str]) -> str:
    text = _read_asset(name)
    for part, content in parts.items():
        text = text.replace(f"<!--{part}-->", content, 1)
    return text


def embedded(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read_asset(name: str) -> str:
    return (resources.files("upweight.runs.report") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the last path parts of folders, as many as make them distinct."""
    paths = [folder.resolve() for folder in folders]
    fewest = 2 if any(path.name in GENERIC for path in paths) else 1
    for count in range(fewest, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]
