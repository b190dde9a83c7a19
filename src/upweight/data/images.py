"""Images of rows: read from columns and content parts, marked in texts, and expanded to placeholder tokens.

While a row is encoded, each image is a mark in its text: `MARK` with the number of the image. A chat template gets a
content part in place of a mark and writes a placeholder, which becomes the mark again. Marks are expanded before a text
is tokenized.
"""

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

from upweight.data.raw_row import Record, RowError, describe_value
from upweight.data.sources.image_urls import download_image
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.image_files import as_rgb, open_image
from upweight.models.processor import Expansion, ImageReader
from upweight.types import ImageRef

MARK = "\ue0f0{}\ue0f1"  # two characters for private use, around a number
MARKS = re.compile("\ue0f0(\\d+)\ue0f1")
COLUMNS = ("images", "image")
SOURCES = ("image", "path", "url", "base64", "image_url")  # keys of a content part that hold an image
IMAGE_TYPES = ("image", "image_url", "input_image")
FOLLOW_PROMPT = ("completion", "chosen", "rejected")  # their messages go on after those of `prompt`
COMPLETIONS = tuple(f"{name}_ids" for name in FOLLOW_PROMPT)
GENERIC = "<image>"  # stands for an image in texts of many datasets
BASE64 = re.compile("[A-Za-z0-9+/]{64,}={0,2}")  # of a file; names of files have a dot
FOLDER = "images"  # in the folder of prepared data, for images that are in no file

Loaded = tuple[ImageRef, Expansion]


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
        return _map_texts(value, lambda text: pattern.sub(lambda _: MARK.format(next(numbers)), text))

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


def is_conversation(value: Any) -> bool:
    """Return whether a column holds messages."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(isinstance(one, Mapping) and ("content" in one or "value" in one) for one in value)


def texts_of(messages: Any) -> Iterator[str]:
    """Yield the contents of messages that are plain texts."""
    for message in messages:
        content = message.get("content", message.get("value"))
        yield from [content] if isinstance(content, str) else []


def _map_texts(value: Any, change: Any) -> Any:
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


def with_images(record: Record, texts: Sequence[str], images: Sequence[Loaded], placeholder: str) -> Record:
    """Return a record of `texts` with references to their images, none of whose tokens is trained on."""
    parts = [MARKS.findall(text) for text in texts]
    first, *others = parts
    if "prompt_ids" in record.columns:
        if any(one != first for one in others if one):
            raise RowError("images", "images in the prompt, before the completion begins")
        used = first
    else:
        used = (
            max(parts, key=len)
            if all(first[: len(one)] == one for one in others)
            else [n for one in parts for n in one]
        )
    if not used:
        raise RowError("images", "a text in which the images have a place; this format leaves them out")
    refs = [images[int(number)][0] for number in used]
    columns = {**record.columns, "images": image_column(refs)}
    ids = columns.get("prompt_ids", columns.get("input_ids", []))
    at = [place for place, token in enumerate(ids) if token == refs[0].token_id]
    turns = [columns.get(name, ()) for name in COMPLETIONS] + columns.get("truth_ids", [])
    in_completions = any(refs[0].token_id in turn for turn in turns)
    if in_completions or len(at) != sum(ref.tokens for ref in refs):
        raise RowError("images", f"texts without the model's token for images, {placeholder}, but for the images'")
    if "loss_mask" in columns:
        mask = list(columns["loss_mask"])
        for number in used:
            start, stop = _written_at(ids, at, images[int(number)])
            at = at[images[int(number)][0].tokens :]
            mask[start:stop] = [False] * (stop - start)
        if not any(mask):
            raise RowError("row", "at least one token that is trained on and stands for no image")
        columns["loss_mask"] = mask
    if "prompt" in columns:  # of online methods, for rewards
        columns["prompt"] = _unmarked(columns["prompt"], placeholder)
    texts_shown = {key: value for key, value in record.text.items() if isinstance(value, str)}
    shown = record.text | {key: MARKS.sub(placeholder, value) for key, value in texts_shown.items()}
    shown["images"] = "; ".join(f"{Path(ref.path).name}: {ref.tokens} tokens" for ref in refs)
    return replace(record, text=shown, columns=columns)


def _written_at(ids: Sequence[int], at: Sequence[int], image: Loaded) -> tuple[int, int]:
    """Return where the tokens of an image start and stop, with its marks of rows and ends; `at`: placeholders."""
    ref, expansion = image
    start = at[0] - expansion.ids.index(ref.token_id)
    stop = start + len(expansion.ids)
    if start >= 0 and tuple(ids[start:stop]) == expansion.ids:
        return start, stop
    return at[0], at[ref.tokens - 1] + 1  # its outer marks are parts of tokens of the text


def _unmarked(value: Any, placeholder: str) -> Any:
    """Return a prompt, text or messages, with image parts or placeholders in place of marks."""
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), str) and MARKS.fullmatch(value["text"]):
            return {"type": "image"}
        return {name: _unmarked(inner, placeholder) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_unmarked(inner, placeholder) for inner in value]
    return MARKS.sub(placeholder, value) if isinstance(value, str) else value


def image_column(refs: Sequence[ImageRef]) -> list[dict[str, Any]]:
    """Return the column of a prepared row with references to images."""
    return [{**vars(ref), "grid": None if ref.grid is None else list(ref.grid)} for ref in refs]


def image_refs(row: Mapping[str, Any]) -> tuple[ImageRef, ...]:
    """Return the references to images that a prepared row holds; none for a user's column of that name."""
    refs = row.get("images")
    if not isinstance(refs, list) or not all(isinstance(ref, Mapping) and "token_id" in ref for ref in refs):
        return ()
    return tuple(ImageRef(**{**ref, "grid": None if ref["grid"] is None else tuple(ref["grid"])}) for ref in refs)


def open_images(refs: Sequence[ImageRef]) -> list[Any]:
    """Return images as Pillow has them, each with the `filename` of what it was read from."""
    opened = []
    for ref in refs:
        image = open_image(Path(ref.path).read_bytes())
        image.filename = ref.path
        opened.append(image)
    return opened


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
