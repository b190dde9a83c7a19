"""Image files as training, vLLM and the page of a run read them: upright, in RGB."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from upweight.errors import UserError

MISSING_PILLOW = "Pillow is not installed: pip install pillow"


def open_image(content: bytes) -> Any:
    """Return an image in RGB from the bytes of its file, as seen by a person; raise a ValueError if it is broken."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(MISSING_PILLOW) from error
    with _broken_images(), Image.open(io.BytesIO(content)) as image:
        return as_rgb(image)


def as_rgb(image: Any) -> Any:
    """Return an image of Pillow's in RGB, as seen by a person; raise a ValueError if it is broken."""
    from PIL import Image, ImageOps

    with _broken_images():
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):  # Pillow would make all but the darkest 256 shades white
            upright = Image.fromarray((np.asarray(upright) // 257).astype(np.uint8))
        elif upright.mode in ("I", "F"):
            raise ValueError(f"its pixels (mode {upright.mode}) have no known range: save it with 8 bits a channel")
        if upright.has_transparency_data:  # over white, as in transformers and in vLLM
            over = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
        return upright.convert("RGB")


@contextmanager
def _broken_images() -> Iterator[None]:
    """Inside, what Pillow raises for a broken image is a ValueError that says what is wrong."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError as error:  # its text has an address in memory
        raise ValueError("no image format that Pillow knows") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
