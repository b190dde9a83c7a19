"""Images in what an OpenEnv server shows: content blocks of MCP tools, and fields of observations that hold one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from upweight.errors import UserError
from upweight.image_files import MISSING_PILLOW

Part = dict[str, Any]


def block_content(blocks: Any) -> str | list[Part] | None:
    """Return the content blocks of a tool's result as text, or as parts where an image is among them; else None."""
    parts = [part for block in blocks or () if isinstance(block, Mapping) and (part := _block_part(block))]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts) if parts else None


def _block_part(block: Mapping[str, Any]) -> Part | None:
    if isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if block.get("type") == "image" and isinstance(block.get("data"), str):
        return {"type": "image", "base64": block["data"]}
    return None


def image_part(value: Any, name: str) -> Part:
    """Return the image of an observation's field: base64, a data URI, or nested numbers as OpenEnv's browsers show."""
    if isinstance(value, str):
        # Without a scheme it is base64 and never the name of a file on this machine.
        return {"type": "image", "url": value} if value.startswith("data:") else {"type": "image", "base64": value}
    return {"type": "image", "image": _drawn(value, name)}


def _drawn(value: Any, name: str) -> Any:
    """Return an image of Pillow's from rows of pixels: grey numbers, or lists of three or four channels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(MISSING_PILLOW) from error
    try:
        pixels = np.asarray(value)
    except ValueError:  # rows of different lengths
        pixels = np.zeros(0)
    grey_or_colour = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (3, 4))
    if not pixels.size or not grey_or_colour or pixels.dtype.kind not in "iu" or pixels.min() < 0 or pixels.max() > 255:
        wanted = "base64, a data URI, or whole numbers from 0 to 255 as [height][width][channels]"
        raise UserError(f"environment.image: the field '{name}' is no image: expected {wanted}.")
    return Image.fromarray(pixels.astype(np.uint8))


def with_images(text: str, images: Sequence[Part]) -> str | list[Part]:
    """Return the content of a message: a text, followed by images if there are any."""
    if not images:
        return text
    return [*([{"type": "text", "text": text}] if text else []), *images]
