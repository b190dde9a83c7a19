"""Files of spreadsheets that are no CSV: what to do with them."""

import shlex
from pathlib import Path

from upweight.data.sources.raw_files import EXCEL
from upweight.errors import UserError

WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")


def refuse_export(file: Path) -> None:
    """Raise a UserError with the way out where a file is a workbook, or a CSV whose first line is for Excel alone."""
    if file.suffix.lower() in WORKBOOKS:
        raise UserError(f"{file}: is a workbook, which is not read: {EXCEL}; then `upweight new` with that file.")
    with file.open("rb") as opened:
        start = opened.read(64)
    if file.suffix.lower() in (".csv", ".tsv") and start.removeprefix(b"\xef\xbb\xbf").lower().startswith(b"sep="):
        name, target = shlex.quote(str(file)), shlex.quote(f"{file.stem}-utf8{file.suffix}")
        problem = "its first line is 'sep=', which is no row of names"
        raise UserError(f"{file}: {problem}. Leave it out: `tail -n +2 {name} > {target}`; or {EXCEL}.")
