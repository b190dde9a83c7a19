"""Prompts with images, as a vLLM server reads them: one placeholder for each image, and the file of the image."""

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from upweight.errors import UserError
from upweight.image_files import open_image
from upweight.models.processor import ImageReader
from upweight.rollout.vllm.token_route import choices_of, token_request
from upweight.types import ImageRef

NEVER = -100.0  # the least bias of a logit that vLLM takes
SENT_AS_THEY_ARE = ("PNG", "JPEG", "WEBP")  # formats that every build of Pillow decodes alike


class ImagePrompts:
    """Writes the requests for prompts with images, and reads what came back."""

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        tokenizer = reader.processor.tokenizer
        self._placeholder: list[int] = tokenizer.encode(reader.placeholder, add_special_tokens=False)

    def without_image_token(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request that never draws the token which stands for images."""
        bias = {**(fields.get("logit_bias") or {}), str(self.reader.token_id): NEVER}
        return {**fields, "logit_bias": bias}

    async def body(self, prompt: Sequence[int], refs: Sequence[ImageRef], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request for the completions of one prompt, which its images travel with once."""
        return await asyncio.to_thread(
            lambda: self.written(prompt, refs, [self.reader.content(ref) for ref in refs], fields)
        )

    def written(
        self, prompt: Sequence[int], refs: Sequence[ImageRef], contents: Sequence[bytes], fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a request for the completions of a prompt and the contents of its images' files."""
        # The server may keep what it read under the digest, which no image of other bytes or settings has.
        parts = [
            {"type": "image_url", "url": data_uri(content), "uuid": ref.digest}
            for ref, content in zip(refs, contents, strict=True)
        ]
        return token_request(self.folded(prompt, refs, contents), fields) | {"content_parts": parts}

    def in_process(
        self, prompt: Sequence[int], refs: Sequence[ImageRef], contents: Sequence[bytes] | None = None
    ) -> dict[str, Any]:
        """Return a prompt and its images as an engine in this process takes them."""
        contents = [self.reader.content(ref) for ref in refs] if contents is None else contents
        return {
            "prompt_token_ids": self.folded(prompt, refs, contents),
            "multi_modal_data": {"image": [open_image(content) for content in contents]},
            "multi_modal_uuids": {"image": [ref.digest for ref in refs]},
        }

    def folded(self, prompt: Sequence[int], refs: Sequence[ImageRef], contents: Sequence[bytes]) -> list[int]:
        """Return a prompt with one placeholder for each image, which the server writes out again."""
        prompt, ids, done, at = list(prompt), [], 0, 0
        for ref, content in zip(refs, contents, strict=True):
            written = self.reader.refer(content, ref.path)[1].ids
            start = self._parted(prompt, _next(prompt, ref.token_id, at) - written.index(ref.token_id), written)
            if start < done or tuple(prompt[start : start + len(written)]) != written:
                problem = "its tokens in the prompt are not those that the processor writes for it alone"
                raise UserError(f"image {ref.path}: {problem}, so vLLM cannot be sent it; sample in this process.")
            ids += [*prompt[done:start], *self._placeholder]
            done = at = start + len(written)
        return [*ids, *prompt[done:]]

    def _parted(self, prompt: list[int], start: int, written: Sequence[int]) -> int:
        """Part the outer tokens of an image from text that is one token with them; return where the image starts."""
        # Gemma 3 writes an empty line before and after an image, and has tokens of several line ends, which vLLM joins
        # again; vLLM 0.32 finds no image that a single line end follows.
        tokenizer, end = self.reader.processor.tokenizer, start + len(written) - 1
        for at, mark, is_start in ((end, written[-1], False), (start, written[0], True)):
            if not 0 <= at < len(prompt) or prompt[at] == mark:
                continue
            joined, own = tokenizer.convert_ids_to_tokens([prompt[at], mark])
            rest = joined.removesuffix(own) if is_start else joined.removeprefix(own)
            beside: int | None = tokenizer.convert_tokens_to_ids(rest)  # that of the unknown token, where there is none
            if beside is None or rest == joined or tokenizer.convert_ids_to_tokens(beside) != rest:
                continue
            if is_start or rest == own:
                prompt[at : at + 1] = [beside, mark] if is_start else [mark, beside]
                start += is_start
        return start

    def choices(self, answer: Mapping[str, Any], prompt: Sequence[int]) -> list[dict[str, Any]]:
        """Return the choices of an answer in the form of /v1/completions; raise if the server wrote other tokens."""
        self.require_same_tokens(answer.get("prompt_token_ids"), prompt)
        return choices_of(answer)

    def require_same_tokens(self, expanded: Any, prompt: Sequence[int]) -> None:
        """Raise where vLLM expanded a prompt to other tokens than training has."""
        if not isinstance(expanded, list):
            raise UserError("vLLM does not return the tokens of prompts with images; use vLLM 0.32 or later")
        if expanded == list(prompt):
            return
        writes, has = expanded.count(self.reader.token_id), list(prompt).count(self.reader.token_id)
        counts = f"{writes} tokens for the images of a prompt where training has {has}"
        if writes == has:
            counts = f"other tokens around the images of a prompt ({len(expanded)} in all, in training {len(prompt)})"
        remedy = "serve the same processor settings (processor_config.json; `processor_kwargs` do not reach vLLM)"
        raise UserError(f"vLLM writes {counts}: {remedy}, or sample in this process (leave out trl.use_vllm).")


def data_uri(content: bytes) -> str:
    """Return a data URI of an image that decodes to what training reads: upright, in RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        kind, opaque = str(image.format), image.mode == "RGB" and not image.has_transparency_data
        plain = opaque and not image.getexif() and image.format in SENT_AS_THEY_ARE
    if not plain:
        buffer = io.BytesIO()
        open_image(content).save(buffer, "PNG", compress_level=1)
        kind, content = "PNG", buffer.getvalue()
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"


def _next(prompt: Sequence[int], token: int, start: int) -> int:
    return next((at for at in range(start, len(prompt)) if prompt[at] == token), -1)
