"""Marks of images in texts: while a row is encoded, an image is a mark with its number.

A chat template gets a content part in place of a mark and writes a placeholder, which becomes the mark again. Marks are
expanded to placeholder tokens before a text is tokenized.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from upweight.data.raw_row import RowError
from upweight.models.processor import Expansion
from upweight.types import ImageRef

MARK = "\ue0f0{}\ue0f1"  # two characters for private use, around a number
MARKS = re.compile("\ue0f0(\\d+)\ue0f1")
GENERIC = "<image>"  # stands for an image in texts of many datasets
Loaded = tuple[ImageRef, Expansion]


def is_conversation(value: Any) -> bool:
    """Return whether a column holds messages."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(isinstance(one, Mapping) and ("content" in one or "value" in one) for one in value)


def texts_of(messages: Any) -> Iterator[str]:
    """Yield the contents of messages that are plain texts."""
    for message in messages:
        content = message.get("content", message.get("value"))
        yield from [content] if isinstance(content, str) else []


def map_texts(value: Any, change: Any) -> Any:
    """Return a text, or messages, with the texts changed."""
    if isinstance(value, str):
        return change(value)
    names = [("content" if "content" in message else "value") for message in value]
    return [
        {**message, name: change(message[name])} if isinstance(message.get(name), str) else message
        for message, name in zip(value, names, strict=True)
    ]


def as_parts(text: str) -> list[dict[str, str]]:
    """Return a message's content as content parts: texts, and an image for each mark."""
    pieces = MARKS.split(text)
    parts = []
    for at, piece in enumerate(pieces):
        if at % 2:
            parts.append({"type": "image"})
        elif piece or len(pieces) == 1:
            parts.append({"type": "text", "text": piece})
    return parts


def with_marks(text: str, placeholder: str, numbers: Sequence[str]) -> str:
    """Return a rendered text with marks in place of placeholders, in their order."""
    pieces = text.split(placeholder)
    if len(pieces) != len(numbers) + 1:
        written = f"{len(pieces) - 1} placeholders {placeholder} for {len(numbers)} images"
        raise RowError("messages", f"a chat template that writes a placeholder for each image, got {written}")
    marks = [*(MARK.format(number) for number in numbers), ""]
    return "".join(piece + mark for piece, mark in zip(pieces, marks, strict=True))


def missing_images(placeholder: str) -> str:
    """Return what is expected of a row whose texts have the model's token for images, and which has none."""
    expected = f"an image for each {placeholder}, the model's token for images, got none"
    return f"{expected}; write it in another way if it is text"


def expanded(text: str, images: Sequence[Loaded]) -> str:
    """Return a text with what stands for each image in place of its mark."""
    return MARKS.sub(lambda mark: images[int(mark[1])][1].text, text) if images else text


def unmarked(value: Any, placeholder: str) -> Any:
    """Return a prompt, text or messages, with image parts or placeholders in place of marks."""
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), str) and MARKS.fullmatch(value["text"]):
            return {"type": "image"}
        return {name: unmarked(inner, placeholder) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [unmarked(inner, placeholder) for inner in value]
    return MARKS.sub(placeholder, value) if isinstance(value, str) else value
