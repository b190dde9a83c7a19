"""`upweight score`: scores a file of completions with a trained reward model."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from upweight.cli.trained import as_trained, trained
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.inference.score import ScoreModel, load_score_model
from upweight.log import quiet_transformers

AT_ONCE = 64  # rows between two writes


def run(place: str, file: Path, overrides: list[str], *, output: Path | None, chat: bool) -> None:
    """Write every row with its score (and those of its steps) as JSON lines to stdout or to `output`."""
    quiet_transformers()
    rows = read_rows(file)
    model = trained(place, overrides)
    data, entry, templated = as_trained(model)
    scorer = load_score_model(model.model, model.adapter, data=data, entry=entry, chat=chat or templated)
    if output is None:
        _write(scorer, rows, sys.stdout)
        return
    with atomic_path(output) as part, part.open("w", encoding="utf-8") as opened:
        _write(scorer, rows, opened)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file."""
    lines = lines_of(text_of(file), file)
    if not lines:
        raise UserError(f"{file}: expected one JSON object on each line")
    return [row_of(line, place) for place, line in lines.items()]


def text_of(file: Path) -> str:
    """Return the text of a file."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    with utf8_from(file):
        return file.read_text(encoding="utf-8")


@contextmanager
def utf8_from(name: object) -> Iterator[None]:
    """Raise a UserError with the source of text that is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text. Save it as UTF-8.") from error


def lines_of(text: str, name: object) -> dict[str, str]:
    """Return the non-empty lines of a text by place; only \\n counts, because JSON texts may hold other line ends."""
    return {f"{name}:{n}": line.rstrip("\r") for n, line in enumerate(text.split("\n"), 1) if line.strip()}


def row_of(line: str, place: str, why: str = "") -> dict[str, Any]:
    """Parse the JSON object of a line; `why` is added to the error."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not JSON{why}: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object")
    return row


def _write(scorer: ScoreModel, rows: list[dict[str, Any]], out: TextIO) -> None:
    for start in range(0, len(rows), AT_ONCE):
        batch = rows[start : start + AT_ONCE]
        for row, scores in zip(batch, scorer(batch, first=start), strict=True):
            out.write(json.dumps({**row, **_summary(scorer, scores)}, ensure_ascii=False) + "\n")
        out.flush()


def _summary(scorer: ScoreModel, scores: list[float]) -> dict[str, Any]:
    if scorer.head == "sequence_score":
        return {"score": scores[0]}
    return {"step_scores": scores, "mean": sum(scores) / len(scores), "min": min(scores)}
