"""The images of one episode: those of its prompt, and those that tools and environments return."""

from collections.abc import Mapping, Sequence
from typing import Any

from upweight.data.images.marks import Loaded
from upweight.data.images.row_images import IMAGE_TYPES, RowImages
from upweight.environments.episode import Message
from upweight.errors import UserError
from upweight.types import ImageRef

NOT_READ = "tools, environment: an image was returned, which this model does not read: return text, or name another."


class EpisodeImages:
    """Puts marks in place of the images in the messages of an episode."""

    def __init__(self, images: RowImages | None, problem: str | None = None) -> None:
        self._images, self._problem = images, problem
        self.loaded: list[Loaded] = []

    def opening(self, messages: Sequence[Message], refs: Sequence[ImageRef]) -> list[Message]:
        """Return the messages before the first turn, which may leave out where the images of the row are."""
        self._require_readable(messages)
        if self._images is None:
            return list(messages)
        column = {"images": [ref.path for ref in refs]} if refs else {}
        marked, loaded = self._images({"prompt": list(messages), **column})
        self.loaded += loaded
        return [_as_text(message) for message in marked["prompt"]]

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of a tool or an environment."""
        self._require_readable(messages)
        if self._images is None:
            return list(messages)
        return [_as_text(message) for message in self._images.mark(messages, self.loaded)]

    def _require_readable(self, messages: Sequence[Message]) -> None:
        if any(_is_image(part) for message in messages for part in _parts(message)):
            if self._images is None:
                raise UserError(NOT_READ)
            if self._problem is not None:
                raise UserError(self._problem)


def without_pixels(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose image parts hold no image, for rewards and files."""
    return [
        {**message, "content": [{"type": "image"} if _is_image(part) else part for part in _parts(message)]}
        if any(_is_image(part) for part in _parts(message))
        else message
        for message in messages
    ]


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def _as_text(message: Message) -> Message:
    """Return a message whose content is one text, as chat templates of models that read images get it."""
    content = message.get("content")
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(str(part.get("text") or "") for part in content or ())}
