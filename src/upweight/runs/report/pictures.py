"""The images of completions, small, for the page of a run."""

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.image_files import open_image

SIDE = 192  # pixels of the longer side on the page
MOST_PICTURES = 100
MOST_BYTES = 64 << 20  # of a file that is read


def picture_names(row: Mapping[str, Any], column: str = "images") -> dict[str, str]:
    """Return the images of a completion's row, or of another column: their files by their digests."""
    images = row.get(column)
    refs = [one for one in images if isinstance(one, Mapping)] if isinstance(images, list) else []
    return {ref["digest"]: ref["path"] for ref in refs if isinstance(ref.get("digest"), str) and ref.get("path")}


class Pictures:
    """Reads images as small data URIs; each once."""

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def read(self, named: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
        """Return the wanted images by their digests, at most `MOST_PICTURES`, without those that cannot be read."""
        shown: dict[str, str] = {}
        for digest in dict.fromkeys(wanted):
            if digest not in self._known and digest in named:
                self._known[digest] = _small(Path(named[digest]))
            uri = self._known.get(digest)
            if uri is not None and len(shown) < MOST_PICTURES:
                shown[digest] = uri
        return shown


def _small(file: Path) -> str | None:
    """Return an image as a data URI. It is decoded and encoded again, so nothing but a picture reaches the page."""
    out = io.BytesIO()
    try:
        if file.stat().st_size > MOST_BYTES:
            return None
        made = open_image(file.read_bytes())
        made.thumbnail((SIDE, SIDE))
        made.save(out, "JPEG", quality=80)
    except (OSError, ValueError, UserError):  # the last without Pillow
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
