"""Prepared data on disk: a key over everything that shapes it, written whole or not at all, checked when read."""

import functools
import hashlib
import json
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.log import logger

MANIFEST = "manifest.json"
BLOCK = 1 << 24


def digest(content: Any) -> str:
    """A name for JSON-like content: equal content, equal name."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """A name for a tokenizer by what it is saved as; where it was loaded from does not matter."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {
            file.name: file.read_text(encoding="utf-8") for file in sorted(Path(folder).iterdir()) if file.is_file()
        }
    for name, text in files.items():
        if name.endswith(".json"):
            files[name] = json.dumps(_lasting(json.loads(text)), sort_keys=True)
    return digest([type(tokenizer).__name__, files])


def _lasting(content: Any) -> Any:
    """A saved tokenizer without what calls leave behind in it, and without where it came from."""
    passing = ("truncation", "padding", "name_or_path", "tokenizer_file", "vocab_file", "is_local")
    return {k: v for k, v in content.items() if k not in passing} if isinstance(content, dict) else content


@functools.cache
def code_digest() -> str:
    """A name for the code and the templates that prepare data: a mended format must not meet old rows."""
    files = sorted(file for file in Path(__file__).parent.rglob("*") if file.suffix in (".py", ".jinja"))
    return digest([[file.name, file.read_text(encoding="utf-8")] for file in files])


def is_whole(folder: Path) -> bool:
    """Whether a folder holds exactly the bytes that were written to it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest) and all(_checksum(folder / name) == found for name, found in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def write_whole(folder: Path, fill: Callable[[Path], None], *, replace: bool) -> None:
    """Let `fill` write a folder under another name, then rename it; `replace` says to put it over a whole one too."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        building.mkdir()
        try:
            fill(building)
            manifest = {file.name: _checksum(file) for file in sorted(building.iterdir())}
            (building / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            _put_in_place(building, folder, replace)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        problem = f"{folder.parent} cannot be written ({error.strerror or error})"
        raise UserError(f"dataset_prepared_path: {problem}. Choose another folder.") from error


def find(folder: Path) -> bool:
    """Whether `folder` can be read; a damaged one is reported and will be replaced."""
    if not folder.exists():
        return False
    if is_whole(folder):
        return True
    logger.warning("%s: is incomplete or damaged; preparing it again", folder)
    return False


def _put_in_place(building: Path, folder: Path, replace: bool) -> None:
    """Rename; what stands there makes way, unless another process has just finished the same work."""
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


def _checksum(file: Path) -> list[int]:
    """Size and CRC of a file."""
    size, crc = 0, 0
    with file.open("rb") as content:
        while block := content.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
