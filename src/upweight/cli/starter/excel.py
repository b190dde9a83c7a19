"""Files that hold no rows as they are: those of spreadsheets, and configs; what to do with them."""

import shlex
from pathlib import Path

from upweight.data.sources.raw_files import EXCEL, workbook_problem
from upweight.errors import UserError


def refuse_export(file: Path) -> None:
    """Raise a UserError with the way out for a workbook, a CSV whose first line is for Excel alone, and a config."""
    if file.suffix.lower() in (".yaml", ".yml"):
        raise UserError(f"{file}: is a config, not a file of rows: `upweight train {shlex.quote(str(file))}`.")
    if problem := workbook_problem(file):
        raise UserError(f"{problem}; then `upweight new` with that file.")
    with file.open("rb") as opened:
        start = opened.read(64)
    if file.suffix.lower() in (".csv", ".tsv") and start.removeprefix(b"\xef\xbb\xbf").lower().startswith(b"sep="):
        name, target = shlex.quote(str(file)), shlex.quote(f"{file.stem}-utf8{file.suffix}")
        problem = "its first line is 'sep=', which is no row of names"
        raise UserError(f"{file}: {problem}. Leave it out: `tail -n +2 {name} > {target}`; or {EXCEL}.")
