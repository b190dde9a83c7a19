"""Images of rows: read from columns and content parts, from files, bytes, base64 and addresses."""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import xxhash

from upweight.data.images.marks import GENERIC, MARK, Loaded, is_conversation, map_texts, texts_of
from upweight.data.raw_row import RowError, describe_value
from upweight.data.sources.image_urls import download_image
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.image_files import as_rgb
from upweight.models.processor import ImageReader

COLUMNS = ("images", "image")
SOURCES = ("image", "path", "url", "base64", "image_url")  # keys of a content part that hold an image
IMAGE_TYPES = ("image", "image_url", "input_image")
FOLLOW_PROMPT = ("completion", "chosen", "rejected")  # their messages go on after those of `prompt`
BASE64 = re.compile("[A-Za-z0-9+/]{64,}={0,2}")  # of a file; names of files have a dot
FOLDER = "images"  # in the folder of prepared data, for images that are in no file


class RowImages:
    """Reads the images of the rows of one entry of `datasets`."""

    def __init__(
        self, reader: ImageReader, folders: Sequence[Path], prepared: Path, hosts: Sequence[str], *, before_text: bool
    ) -> None:
        """`hosts`: from which images may be downloaded."""
        self.reader, self.folders, self.store, self.hosts = reader, folders, prepared / FOLDER, hosts
        self.before_text = before_text  # images of a column: before the first user text, or after it

    def __call__(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], list[Loaded]]:
        """Return a row with marks in place of images in its texts, without their columns; and the images."""
        loaded: list[Loaded] = []
        number = self._numbering(loaded)
        columns = [name for name in COLUMNS if row.get(name) is not None]
        listed: list[int] = []
        for name in columns:
            value = row[name]
            items = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
            listed += [number(item, name if at is None else f"{name}[{at}]") for at, item in items]
        marked = {name: value for name, value in row.items() if name not in COLUMNS}
        parts = _Parts(number, listed)
        for name in sorted(marked, key=lambda name: name in FOLLOW_PROMPT):
            if is_conversation(marked[name]):
                marked[name] = parts.marked(marked[name], name)
        if listed and not parts.bare:
            self._place(marked, listed, columns[0])
        elif listed and parts.most != len(listed):
            raise RowError(columns[0], f"an image for each of the {parts.most} image parts, got {len(listed)}")
        return marked, loaded

    def mark(self, messages: Sequence[Mapping[str, Any]], loaded: list[Loaded]) -> list[dict[str, Any]]:
        """Return messages that hold their images, with marks in place of these; new ones are added to `loaded`."""
        return _Parts(self._numbering(loaded), ()).marked(messages, "messages")

    def _numbering(self, loaded: list[Loaded]) -> Callable[[Any, str], int]:
        """Return a function from an image and its key to its number in `loaded`, which it adds a new one to."""
        number_of = {ref.digest: number for number, (ref, _) in enumerate(loaded)}

        def number(source: Any, key: str) -> int:
            one = self._load(source, key)
            if one[0].digest not in number_of:
                number_of[one[0].digest] = len(loaded)
                loaded.append(one)
            return number_of[one[0].digest]

        return number

    def _place(self, row: dict[str, Any], listed: Sequence[int], column: str) -> None:
        """Put the images of a column where a text names them, else into the first user message."""
        names = [name for name, value in row.items() if is_conversation(value)]
        texts = [name for name, value in row.items() if isinstance(value, str) and self._placeholders(value)]
        inside = [name for name in names if any(self._placeholders(text) for text in texts_of(row[name]))]
        if texts or inside:
            for name in texts or inside:
                row[name] = self._named(row[name], iter(listed), name, len(listed))
            return
        first = [name for name in names if name not in FOLLOW_PROMPT] or names
        if not first:
            wanted = f"the placeholder {GENERIC} in its text for each image, or messages"
            raise RowError(column, f"{wanted}; the row has neither")
        for name in first[:1] if first[0] not in FOLLOW_PROMPT else first:
            row[name] = self._in_first_user_message(row[name], listed, name)

    def _placeholders(self, text: str) -> list[str]:
        return re.findall(f"{re.escape(self.reader.placeholder)}|{re.escape(GENERIC)}", text)

    def _named(self, value: Any, numbers: Iterator[int], key: str, count: int) -> Any:
        """Return a text, or messages, with marks in place of placeholders."""
        texts = [value] if isinstance(value, str) else list(texts_of(value))
        if (placeholders := sum(len(self._placeholders(text)) for text in texts)) != count:
            raise RowError(key, f"a placeholder for each of {count} images, got {placeholders}")
        pattern = re.compile(f"{re.escape(self.reader.placeholder)}|{re.escape(GENERIC)}")
        return map_texts(value, lambda text: pattern.sub(lambda _: MARK.format(next(numbers)), text))

    def _in_first_user_message(self, messages: Any, listed: Sequence[int], key: str) -> list[Any]:
        marks = [{"type": "text", "text": MARK.format(number)} for number in listed]
        result, placed = [], False
        for message in messages:
            name = "content" if "content" in message else "value"
            if not placed and message.get("role", message.get("from")) in ("user", "human"):
                content, placed = message.get(name), True
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
                result.append({**message, name: [*marks, *parts] if self.before_text else [*parts, *marks]})
            else:
                result.append(message)
        if not placed:
            raise RowError(key, "a message of the user, which the images belong to")
        return result

    def _load(self, source: Any, key: str) -> Loaded:
        path = None
        try:
            content, path = self._content(source, key)
            loaded = self.reader.refer(content, path or "")
        except UserError:
            raise
        except ValueError as error:
            form = path or ("bytes" if isinstance(source, bytes) else describe_value(source))
            raise RowError(key, f"an image, got {form} that cannot be read as one: {error}") from error
        return loaded if path else (replace(loaded[0], path=self._stored(loaded[0].digest, content)), loaded[1])

    def _content(self, source: Any, key: str) -> tuple[bytes, str | None]:
        """Return the bytes of an image file, and its path if it has one."""
        if isinstance(source, Mapping):  # as `datasets` stores images, or as OpenAI names them
            if source.get("bytes") is not None:
                return self._content(source["bytes"], key)
            return self._content(source.get("path") or source.get("url"), key)
        if isinstance(source, bytes):
            return source, None
        if isinstance(source, str) and source.startswith("data:"):
            return _decoded(source.partition(",")[2], key), None
        if isinstance(source, str) and re.match(r"https?://", source):
            return self._downloaded(source, key)
        if isinstance(source, str) and source:
            return self._file(source.removeprefix("file://"), key)
        if not isinstance(source, str) and hasattr(source, "save"):  # an image of Pillow
            buffer = BytesIO()
            as_rgb(source).save(buffer, "PNG")
            return buffer.getvalue(), None
        raise RowError(key, f"an image: a file, bytes or base64, got {describe_value(source)}")

    def _file(self, name: str, key: str) -> tuple[bytes, str | None]:
        for folder in self.folders:
            file = folder / Path(name).expanduser()
            with suppress(OSError):  # of a text that is too long for a name
                if file.is_file():
                    return file.read_bytes(), str(file.absolute())
        with suppress(binascii.Error):
            if BASE64.fullmatch(name):
                return base64.b64decode(name, validate=True), None
        places = ", ".join(dict.fromkeys(str(folder.absolute()) for folder in self.folders))
        raise RowError(key, f"an image file; there is no {name[:200]} in {places}")

    def _downloaded(self, url: str, key: str) -> tuple[bytes, str]:
        """Return an image and its file, which is kept beside the prepared data: an address is read once."""
        name = f"url-{xxhash.xxh3_128_hexdigest(url.encode())}"
        file = self.store / name
        content = file.read_bytes() if file.is_file() else download_image(url, self.hosts, key)
        return content, self._stored(name, content)

    def _stored(self, name: str, content: bytes) -> str:
        """Write an image that came in no file, once; return its path."""
        file = self.store / name
        try:
            if not file.is_file():
                self.store.mkdir(parents=True, exist_ok=True)
                with atomic_path(file) as partial:
                    partial.write_bytes(content)
        except OSError as error:
            problem = f"{self.store} cannot be written ({error.strerror})"
            raise UserError(f"dataset_prepared_path: {problem}; images of rows are kept there.") from error
        return str(file.absolute())


class _Parts:
    """Replaces image parts of messages by marks; a bare part takes the next image of the row's column."""

    def __init__(self, number: Any, listed: Sequence[int]) -> None:
        self.number, self.listed = number, listed
        self.bare = self.most = self.in_prompt = 0

    def marked(self, messages: Any, key: str) -> list[Any]:
        at = self.in_prompt if key in FOLLOW_PROMPT else 0
        result = []
        for place, message in enumerate(messages):
            name = "content" if "content" in message else "value"
            content = message.get(name)
            if not isinstance(content, list | tuple):
                result.append(message)
                continue
            parts = []
            for index, part in enumerate(content):
                if not isinstance(part, Mapping) or part.get("type", "text") not in IMAGE_TYPES:
                    parts.append(part)
                    continue
                where = f"{key}[{place}].{name}[{index}]"
                source = next((part[one] for one in SOURCES if part.get(one) is not None), None)
                if isinstance(source, str) and part.get("base64") is source and not source.startswith("data:"):
                    source = _decoded(source, where)
                if source is None:
                    if at >= len(self.listed):
                        raise RowError(where, f"an image; the row's columns hold {len(self.listed)}")
                    self.bare += 1
                number = self.listed[at] if source is None else self.number(source, where)
                at += source is None
                parts.append({"type": "text", "text": MARK.format(number)})
            result.append({**message, name: parts})
        self.most = max(self.most, at)
        if key == "prompt":
            self.in_prompt = at
        return result


def _decoded(text: str, key: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(key, f"base64 of an image file ({error})") from error


def undecoded(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return a dataset whose images are the bytes or paths that it stores; one without images as it is."""
    if dataset.format["type"] is not None or "Image(" not in str(dataset.features):
        return dataset
    return dataset.cast(datasets.Features({name: _undecoded(value) for name, value in dataset.features.items()}))


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(mode=feature.mode, decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(value) for name, value in feature.items()}
    return [_undecoded(value) for value in feature] if isinstance(feature, list) else feature
