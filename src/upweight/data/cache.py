"""The cache of prepared data on disk: keyed by everything that affects it, written atomically, verified when read."""

import functools
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset

from upweight import row_rules
from upweight.errors import UserError
from upweight.runs.checkpoints import is_whole, mark_whole

# What a saved tokenizer holds of past calls and of where it came from.
VOLATILE_TOKENIZER_KEYS = ("truncation", "padding", "name_or_path", "tokenizer_file", "vocab_file", "is_local")
ROWS_PER_DIGEST = 1 << 12  # that are hashed at once
IN_DIGESTS = {"loss_mask": "scored", "input_ids": "ids"}  # digests in checkpoints have columns under these names


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def rows_digest(rows: Dataset) -> str:
    """Return a hash of the content of prepared rows, in their order; how they are stored does not count."""
    names = sorted(rows.column_names, key=lambda name: IN_DIGESTS.get(name, name))
    hasher = xxhash.xxh3_128(",".join(IN_DIGESTS.get(name, name) for name in names).encode())
    tables = rows.with_format("arrow")
    for start in range(0, len(rows), ROWS_PER_DIGEST):
        table: Any = tables[start : start + ROWS_PER_DIGEST]
        for batch in table.select(names).combine_chunks().to_batches():
            hasher.update(batch.serialize())
    return hasher.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a hash of the files that a tokenizer is saved as; its source path does not count."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        saved = [file for file in Path(folder).iterdir() if file.is_file()]
        files: dict[str, Any] = {file.name: file.read_text(encoding="utf-8") for file in saved}
    for name, text in files.items():
        if name.endswith(".json") and isinstance(content := json.loads(text), dict):
            files[name] = {key: value for key, value in content.items() if key not in VOLATILE_TOKENIZER_KEYS}
    return digest([type(tokenizer).__name__, files])


@functools.cache
def code_digest() -> str:
    """Return a hash of the code and the templates that prepare data, so that a changed format makes new rows."""
    files = sorted(file for file in Path(__file__).parent.rglob("*") if file.suffix in (".py", ".jinja"))
    return digest([[file.name, file.read_text(encoding="utf-8")] for file in (*files, Path(row_rules.__file__))])


def write_folder(folder: Path, fill: Callable[[Path], None], *, replace: bool) -> None:
    """Let `fill` write a temporary folder, then rename it; `replace` also replaces a folder that is whole."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        building.mkdir()
        try:
            fill(building)
            mark_whole(building)
            _put_in_place(building, folder, replace)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        problem = f"{folder.parent} cannot be written ({error.strerror or error})"
        raise UserError(f"dataset_prepared_path: {problem}. Choose another folder.") from error


def _put_in_place(building: Path, folder: Path, replace: bool) -> None:
    """Rename `building` to `folder` and replace what is there, unless another process has finished the same work."""
    while True:
        try:
            os.rename(building, folder)
            return
        except OSError:
            if not folder.exists():
                raise
            if not replace and is_whole(folder):
                return
            old = building.with_name(f"{building.name}.old")
            os.rename(folder, old)
            shutil.rmtree(old, ignore_errors=True)
