"""Images of prepared rows: references to them, beside token ids in which each has its placeholders."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from upweight.data.images.marks import MARKS, Loaded, unmarked
from upweight.data.images.row_images import FOLLOW_PROMPT
from upweight.data.raw_row import Record, RowError
from upweight.image_files import open_image
from upweight.types import ImageRef

COMPLETIONS = tuple(f"{name}_ids" for name in FOLLOW_PROMPT)


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
        columns["prompt"] = unmarked(columns["prompt"], placeholder)
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
