"""Files of spreadsheets that are no CSV in UTF-8: what to do with them."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upweight.errors import UserError

WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
SAVE = "In Excel: File, Save as, 'CSV UTF-8'"


@contextmanager
def explain_export(file: Path) -> Iterator[None]:
    """Raise a UserError with the way out where a file is a workbook, or a CSV as older versions of Excel write it."""
    if file.suffix.lower() in WORKBOOKS:
        raise UserError(f"{file}: is a workbook, which is not read. {SAVE}; then `upweight new` with that file.")
    is_csv = file.suffix.lower() in (".csv", ".tsv")
    with file.open("rb") as opened:
        start = opened.read(64)
    name, target = shlex.quote(str(file)), shlex.quote(f"{file.stem}-utf8{file.suffix}")
    if is_csv and start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{file}: is UTF-16. {SAVE}; or `iconv -f utf-16 -t utf-8 {name} > {target}`.")
    if is_csv and start.removeprefix(b"\xef\xbb\xbf").lower().startswith(b"sep="):
        problem = "its first line is 'sep=', which is no row of names"
        raise UserError(
            f"{file}: {problem}. Leave it out: `tail -n +2 {name} > {target}`; or {SAVE[0].lower()}{SAVE[1:]}."
        )
    try:
        yield
    except UserError as error:
        if not is_csv or "codec can't decode" not in str(error):
            raise
        remedy = f"{SAVE}; or `iconv -f cp1252 -t utf-8 {name} > {target}`"
        raise UserError(f"{file}: is not UTF-8. {remedy}.") from error
