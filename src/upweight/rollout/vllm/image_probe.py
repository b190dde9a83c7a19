"""A prompt with an image, by which vLLM and the trainer are compared: weights, positions, preparation of images."""

import io
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils.import_utils import is_torchvision_available

from upweight.log import warn_once
from upweight.models.vision import token_types
from upweight.rollout.vllm.client import RequestRefused, VllmClient
from upweight.rollout.vllm.images import ImagePrompts
from upweight.rollout.vllm.probe import FLOAT32_LIMIT, agrees, difference, probe_fields
from upweight.rollout.vllm.token_route import GENERATE, explained

# Widths and heights that are no multiples of a patch and no side of a tile. Published processors of most families make
# each image wider and lower at once (84 x 896, 896 x 896, 448 x 448), where libraries differ most: Pillow 13 shrinks
# before it stretches, torchvision and older Pillow go by rows first. The first is cheap where images are cut into tiles
# by their longer side (SmolVLM: 5 tiles in place of 17), the second where by their shape (InternVL: 1 in place of 12).
TALL, NEARLY_SQUARE = (83, 909), (433, 467)
SMALL = (43, 59)  # of fewer tokens, for short servers
HALF_LIMIT = 0.1  # mean difference that rounding in half precision does not explain


class ImageProbe:
    """A prompt with one image that has to be resized, and its comparison."""

    def __init__(self, prompts: ImagePrompts, temperature: float, size: tuple[int, int]) -> None:
        self._prompts, self._reader = prompts, prompts.reader
        self._content = _picture(*size)
        ref, expansion = self._reader.refer(self._content, "probe.png")
        self._refs = (ref,)
        around = self._reader.processor.tokenizer.encode("ab", add_special_tokens=False)
        self.prompt: list[int] = [*around, *expansion.ids, *around]
        self.fields = prompts.without_image_token(probe_fields(temperature))
        self.length = len(self.prompt) + int(self.fields["max_tokens"])
        self._exact: bool | None = None  # whether the first answer was equal to the last digits, as in float32

    @property
    def request(self) -> dict[str, Any]:
        """Return the prompt and its image as an engine in this process takes them."""
        return self._prompts.in_process(self.prompt, self._refs, [self._content])

    async def ask(self, client: VllmClient, name: str) -> tuple[list[int], list[float]]:
        """Return the prompt with the tokens that the server samples after it, and their log-probs."""
        body = self._prompts.written(self.prompt, self._refs, [self._content], self.fields)
        try:
            answer = await client.ask(GENERATE, {**body, "model": name}, seconds=None)
        except RequestRefused as error:
            raise explained(error, client.url, "prompts with images") from None
        (choice,) = self._prompts.choices(answer, self.prompt)
        return [*self.prompt, *choice["token_ids"]], choice["logprobs"]["token_logprobs"]

    def comparison(
        self, ids: list[int], logps: list[float], temperature: float, *, adapted: bool
    ) -> Callable[[nn.Module], tuple[float, float]]:
        """Return a function that compares a model, with or without its adapter, with the server's log-probs."""
        ids_BN, token = torch.tensor([ids]), self._reader.token_id
        pixels = self._reader.inputs_of(self._content) | token_types(self._reader.family, ids_BN == token)
        options: dict[str, Any] = {"adapted": adapted, "prompt": len(self.prompt), "images": pixels, "never": token}
        return partial(difference, ids=ids, reported_logps=logps, temperature=temperature, **options)

    def agrees(self, mean: float, largest: float, *, exact: bool) -> bool:
        """Whether a difference is within the limit; `exact` where log-probs of text are equal, as in float32."""
        if self._exact is None:
            # Far below the limit, so that another way of resizing never counts as the same and then fails by chance.
            self._exact = exact and largest <= FLOAT32_LIMIT / 10
            if not self._exact and agrees(mean, largest, exact=False):
                self._warn_of_images(mean, largest, exact=exact)
        return agrees(mean, largest, exact=self._exact)

    def _warn_of_images(self, mean: float, largest: float, *, exact: bool) -> None:
        """Warn if the first difference comes of images; where precision hides that, of what is known without it."""
        apart, here = "vLLM's log-probs after an image differ by", self._reader.processor.image_processor
        causal = ", or on a CPU lets tokens of an image see only those before them (vLLM 0.32)"
        cause = f"it prepares images in another way{causal if self._reader.family.sees_whole_image else ''}"
        if exact:
            apart = f"{apart} up to {largest:.2g} from the trainer's, those after text do not"
        elif mean > HALF_LIMIT:
            apart = f"{apart} {mean:.2g} on average from the trainer's, more than rounding explains"
        elif is_torchvision_available():
            return
        else:  # which vLLM's packages for GPUs require
            apart, cause = "log-probs in half precision", "they do not show whether vLLM resizes images as is done here"
        warn_once(f"{apart}: {cause}. {resizing(here)}")


def image_probe(prompts: ImagePrompts | None, temperature: float, longest: int | None) -> ImageProbe | None:
    """Return a probe for sequences of up to `longest` tokens; None where no images are compared, or none fits."""
    if prompts is None:
        return None

    def tokens(size: tuple[int, int]) -> int:
        return len(prompts.reader.expansion(*size).ids)

    large = (TALL, NEARLY_SQUARE) if tokens(TALL) <= 2 * tokens(NEARLY_SQUARE) else (NEARLY_SQUARE, TALL)
    probes = [ImageProbe(prompts, temperature, size) for size in (*large, SMALL)]
    for probe in probes:
        if longest is None or probe.length <= longest:
            return probe
    warn_once(
        f"vLLM and the trainer are not compared after an image, which takes {min(probe.length for probe in probes)} "
        f"tokens where vLLM takes {longest}: vllm.max_model_len"
    )
    return None


def resizing(image_processor: Any) -> str:
    """Return what resizes images here, and what to install so that a server does it alike."""
    from transformers.image_processing_backends import TorchvisionBackend  # which needs Pillow

    same = "with the same processor_config.json"
    if isinstance(image_processor, TorchvisionBackend):
        return f"Here torchvision {version('torchvision')} resizes them: install that for vLLM too, {same}"
    pillow = f"Here Pillow {version('pillow')} resizes them"
    if is_torchvision_available():
        both = f"that Pillow and torchvision {version('torchvision')}"
        return f"{pillow}, though torchvision is installed: have {both} for vLLM too, {same}"
    installs = "if vLLM's Python has it, install it here too (pip install torchvision), else that Pillow there"
    return f"{pillow}, since torchvision is not installed: {installs}, {same}"


def _picture(width: int, height: int) -> bytes:
    """Return an image whose left half is noise, where filters differ most, and whose right half is smooth waves."""
    from PIL import Image

    pixels = np.random.default_rng(7).integers(0, 256, (height, width, 3)).astype(np.uint8)
    row, column, colour = np.ogrid[:height, width // 2 : width, :3]
    pixels[:, width // 2 :] = (127.5 + 127.5 * np.sin(column / 11 + row / 7 + 2 * colour)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
