"""Vision-language models: which families there are, and what each needs beside tokens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from upweight.errors import UserError
from upweight.models.kernels.vision_windows import use_window_attention
from upweight.models.modules import backbone_of


@dataclass(frozen=True)
class VisionFamily:
    """What the models of a family read, and how their image tokens attend."""

    inputs: tuple[str, ...] = ("pixel_values",)  # of the processor's, for the vision tower
    images_axis: int = 0  # of these inputs, along which images lie
    token_types: str | None = None  # the input of a plain forward that marks placeholder tokens
    has_grid: bool = False  # image tokens have positions in time, height and width
    sees_whole_image: bool = False  # tokens of an image see each other in both directions


_TILES = VisionFamily(("pixel_values", "pixel_attention_mask"), images_axis=1)
_SIZED = VisionFamily(("pixel_values", "image_sizes"))  # images are padded to one size, or number of tiles
_GRID = VisionFamily(("pixel_values", "image_grid_thw"), token_types="mm_token_type_ids", has_grid=True)
FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(),
    "llava_next": _SIZED,
    "mistral3": _SIZED,
    "internvl": VisionFamily(),
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "qwen2_vl": _GRID,
    "qwen2_5_vl": _GRID,
    "qwen3_vl": _GRID,
    "gemma3": VisionFamily(token_types="token_type_ids", sees_whole_image=True),
}
Inputs = dict[str, Tensor]  # of a vision tower, as a processor returns them


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """The features of some images, one after the other, in place of embeddings and after the first text layers."""

    embeds_ID: Tensor
    of_layers: tuple[Tensor, ...] = ()


def vision_family(config: PreTrainedConfig) -> VisionFamily | None:
    """Return the family of a model that reads images; None for a text model."""
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type == "llava" and config.vision_config.model_type == "pixtral":
        return _SIZED
    return FAMILIES.get(config.model_type)


def require_family(config: PreTrainedConfig, source: str) -> None:
    """Raise for a model that reads more than text in a way that is not known."""
    inputs = {"vision_config": "images", "audio_config": "audio"}
    reads = [name for part, name in inputs.items() if getattr(config, part, None) is not None]
    if not reads or (reads == ["images"] and config.model_type in FAMILIES):
        return
    raise UserError(
        f"base_model: {source!r} ({config.model_type}) reads {' and '.join(reads)}, which Upweight cannot train for "
        f"this type: name its text-only variant, or a model of one of these types: {', '.join(FAMILIES)}"
    )


def joined_inputs(family: VisionFamily, images: Sequence[Inputs]) -> Inputs:
    """Return the vision tower's inputs of several images from those of each."""
    return {name: _joined([image[name] for image in images], family.images_axis) for name in family.inputs}


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Join tensors along an axis; along the others, smaller ones are filled with zeros, as a processor does."""
    largest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    filled = []
    for part in parts:
        missing = [0 if at == axis else most - part.shape[at] for at, most in enumerate(largest)]
        filled.append(F.pad(part, [side for more in reversed(missing) for side in (0, more)]) if any(missing) else part)
    return torch.cat(filled, axis)


def image_features(base: PreTrainedModel, inputs: Inputs) -> ImageFeatures:
    """Run the vision tower; return the features of its images in the order of their placeholder tokens."""
    body: Any = backbone_of(base)  # a classifier itself has no features of images
    if isinstance(tower := getattr(body, "visual", None), PreTrainedModel):
        use_window_attention(tower)
    out: Any = body.get_image_features(**inputs, return_dict=True)
    layers = getattr(out, "deepstack_features", None) or ()
    return ImageFeatures(_flat(out.pooler_output), tuple(_flat(features) for features in layers))


def _flat(features: Any) -> Tensor:
    """Return features [I, D] of images that lie in one tensor, or in one for each image."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def token_types(family: VisionFamily, is_image_BN: Tensor) -> Inputs:
    """Return the input by which a forward knows placeholder tokens, if the family's models read one."""
    return {} if family.token_types is None else {family.token_types: is_image_BN.long()}


def vision_module_names(base: PreTrainedModel) -> list[str]:
    """Return the names of a model's parts that only images go through: all of its body but the language model."""
    decoder, body = base.get_decoder(), base.base_model
    prefix = next(name for name, module in base.named_modules() if module is body)
    parts = [name for name, module in body.named_children() if decoder not in set(module.modules())]
    return [f"{prefix}.{name}" for name in parts]


def freeze_vision(base: PreTrainedModel) -> str:
    """Freeze what only images go through; return a pattern of the names of its modules."""
    names = vision_module_names(base)
    for name in names:
        base.get_submodule(name).requires_grad_(False)
    return "|".join(rf"{re.escape(name)}(\..*)?" for name in names)
