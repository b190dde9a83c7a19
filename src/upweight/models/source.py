"""The folder, GGUF file or hub id of a model, and errors of loading it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upweight.errors import UserError


def source_of(base_model: str | None, gguf_file: str | None, key: str = "base_model") -> tuple[str, str | None]:
    """Return the folder or hub id that the user named, and the GGUF file in it."""
    if base_model is None:
        raise UserError("base_model: no model is named; give a folder, a GGUF file or a hub id")
    place = Path(base_model).expanduser()
    if gguf_file is None and place.suffix == ".gguf" and place.is_file():
        return str(place.parent), place.name
    if place.is_dir():
        if gguf_file is not None and not (place / gguf_file).is_file():
            raise UserError(f"gguf_file: {place / gguf_file} does not exist")
        return str(place), gguf_file
    looks_like_a_path = base_model.startswith((".", "~", os.sep)) or base_model.count("/") > 1
    if looks_like_a_path:
        raise UserError(f"{key}: {base_model} is no folder here (looked in {place.absolute()}). Correct the path")
    return base_model, gguf_file


@contextmanager
def load_failures(key: str, place: str, what: str) -> Iterator[None]:
    """Turn the failures of loading from `place` into user errors with a remedy."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, ImportError) as error:
        text = str(error)
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        if "trust_remote_code" in text:
            remedy = "it runs code from its own repository: read that code, then set `trust_remote_code: true`"
        elif "gguf" in text.lower() and isinstance(error, ImportError):
            remedy = "reading GGUF files needs the package gguf: pip install gguf"
        elif isinstance(error, ImportError):
            remedy = f"a package is missing: {first}"
        elif "Unrecognized configuration class" in text:
            remedy = "its type has no model with the head that is trained (encoder-decoders have none): name a decoder"
        elif Path(place).is_dir():
            remedy = f"the folder does not hold a whole one: {first}"
        else:
            remedy = (
                "no folder of that name is here, and the hub did not give it (offline, misspelt, or private: "
                f"then log in with `hf auth login`): {first}"
            )
        raise UserError(f"{key}: could not load the {what} of {place!r}: {remedy}") from error
