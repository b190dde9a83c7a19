"""Processors of vision-language models: load one, expand placeholders, and read the pixels of images.

A processor travels with its tokenizer, as it does in a model's folder: whatever passes the tokenizer on need not know.
"""

import hashlib
import importlib.util
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from upweight.config.sections.model import ModelSection
from upweight.errors import UserError, did_you_mean
from upweight.image_files import MISSING_PILLOW, open_image
from upweight.log import warn_once
from upweight.models.load import hub_options, load_failures, resolve_source
from upweight.models.vision import Inputs, joined_inputs, token_types, vision_family
from upweight.types import ImageRef

_ATTRIBUTE = "upweight_images"  # of a tokenizer
PIXEL_CACHE_BYTES = 1 << 28
CACHED_SIZES = 4096
BLANK_SIZE, BLANK_COLOUR = (64, 64), (127, 80, 40)  # some towers leave out tiles that are zero everywhere
PROCESSOR_FILE = "processor_config.json"


class Expansion(NamedTuple):
    """What stands for an image of some size in a text."""

    text: str
    tokens: int  # placeholder tokens in it
    grid: tuple[int, int, int] | None
    ids: tuple[int, ...] = ()  # its tokens


class ImageReader:
    """Reads images for a model: their placeholder tokens, and the inputs of its vision tower."""

    def __init__(self, processor: Any, config: PreTrainedConfig) -> None:
        family = vision_family(config)
        assert family is not None
        self.processor, self.family = processor, family
        self.token_id: int = config.image_token_id
        self.placeholder: str = processor.image_token  # which a chat template writes once for an image
        self.settings = hashlib.sha256(processor.image_processor.to_json_string().encode()).hexdigest()[:16]
        self.expansion = lru_cache(maxsize=4096)(self._expansion)
        self._sizes: OrderedDict[str, tuple[int, int]] = OrderedDict()  # rows of a group have the same images
        self._pixels: OrderedDict[str, Inputs] = OrderedDict()
        self._bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("processor", "family", "token_id", "placeholder", "settings")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, expansion=lru_cache(maxsize=4096)(self._expansion), _bytes=0)
        self._sizes, self._pixels = OrderedDict(), OrderedDict()

    def digest(self, content: bytes) -> str:
        """Return the identity of an image: of its bytes and of how they are processed."""
        return hashlib.sha256(content).hexdigest()[:32] + self.settings

    def refer(self, content: bytes, path: str) -> tuple[ImageRef, Expansion]:
        """Return the reference to an image and what stands for it in a text; raise a ValueError if it is broken."""
        digest = self.digest(content)
        size = self._sizes.get(digest)  # several threads may ask
        if size is None:
            size = self._sizes[digest] = open_image(content).size
            if len(self._sizes) > CACHED_SIZES:
                self._sizes.popitem(last=False)
        expansion = self.expansion(*size)
        return ImageRef(digest, path, expansion.tokens, self.token_id, expansion.grid), expansion

    def _expansion(self, width: int, height: int) -> Expansion:
        from PIL import Image

        try:
            out = self._process(Image.new("RGB", (width, height), BLANK_COLOUR))
        except (ValueError, ArithmeticError) as error:  # of an image that is too wide, say
            name = type(self.processor).__name__
            raise ValueError(f"{name} takes no image of {width} x {height} pixels: {error}") from error
        ids = out["input_ids"][0].tolist()
        grid = out["image_grid_thw"][0].tolist() if self.family.has_grid else None
        tokenizer = self.processor.tokenizer
        # Some tokenizers put spaces between tokens when they decode.
        texts = tokenizer.decode(ids, clean_up_tokenization_spaces=False), "".join(tokenizer.convert_ids_to_tokens(ids))
        text = next((one for one in texts if tokenizer.encode(one, add_special_tokens=False) == ids), None)
        if text is None:
            raise UserError(f"processor_type: {type(self.processor).__name__} writes image tokens that are not text")
        on_grid = None if grid is None else (grid[0], grid[1], grid[2])
        return Expansion(text, ids.count(self.token_id), on_grid, tuple(ids))

    def _process(self, image: Any) -> Any:
        return self.processor(text=[self.placeholder], images=[image], add_special_tokens=False, return_tensors="pt")

    def inputs(self, refs: Sequence[ImageRef]) -> Inputs:
        """Return the vision tower's inputs of some images, read from their files."""
        return joined_inputs(self.family, [self._read(ref) for ref in refs])

    @cached_property
    def blank_inputs(self) -> Inputs:
        """The vision tower's inputs of a small image that stands for nothing; of one in tiles, the first."""
        from PIL import Image

        out = self._process(Image.new("RGB", BLANK_SIZE, BLANK_COLOUR))
        tiles = {name: out[name] for name in self.family.inputs}
        if self.family.has_grid:  # patches of one image
            return tiles
        return {name: value.narrow(self.family.images_axis, 0, 1) for name, value in tiles.items()}

    def plain_inputs(self, images: Sequence[Sequence[ImageRef]], ids_BN: Tensor) -> Inputs:
        """Return what a plain forward of sequences reads beside their ids: the images of each, in order."""
        pixels = self.inputs([ref for several in images for ref in several])
        moved = {name: value.to(ids_BN.device) for name, value in pixels.items()}
        return moved | token_types(self.family, ids_BN == self.token_id)

    def content(self, ref: ImageRef) -> bytes:
        """Return the bytes of an image's file; raise if they are not those of the prepared row."""
        try:
            content = Path(ref.path).read_bytes()
        except OSError as error:
            remedy = "it was there when the rows were prepared: put it back, or prepare the rows again"
            raise UserError(f"image {ref.path}: cannot be read ({error.strerror}); {remedy}") from error
        if self.digest(content) != ref.digest:
            remedy = "set `skip_prepare_dataset: true` once, or remove `dataset_prepared_path`"
            raise UserError(f"image {ref.path}: changed since the rows were prepared; {remedy}")
        return content

    def inputs_of(self, content: bytes) -> Inputs:
        """Return the vision tower's inputs of one image from the bytes of its file."""
        out = self._process(open_image(content))
        return {name: out[name] for name in self.family.inputs}

    def _read(self, ref: ImageRef) -> Inputs:
        """Return the inputs of one image; the last ones are kept, since several forwards may read a row."""
        if ref.digest in self._pixels:
            self._pixels.move_to_end(ref.digest)
            return self._pixels[ref.digest]
        inputs = self.inputs_of(self.content(ref))
        self._pixels[ref.digest] = inputs
        self._bytes += _size(inputs)
        while self._bytes > PIXEL_CACHE_BYTES and len(self._pixels) > 1:
            self._bytes -= _size(self._pixels.popitem(last=False)[1])
        return inputs


def _size(inputs: Inputs) -> int:
    return sum(value.numel() * value.element_size() for value in inputs.values())


def image_reader(tokenizer: Any) -> ImageReader | None:
    """Return what reads images for the model of a tokenizer; None for a model, or without a processor, of text."""
    return getattr(tokenizer, _ATTRIBUTE, None)


def attach_processor(processor: Any, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, with which the processor then travels."""
    tokenizer = processor.tokenizer
    if processor.chat_template and not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    if vision_family(config) is not None:
        setattr(tokenizer, _ATTRIBUTE, ImageReader(processor, config))
    return tokenizer


def with_processor(
    tokenizer: PreTrainedTokenizerBase, section: ModelSection, folder: Path | None = None
) -> PreTrainedTokenizerBase:
    """Return a tokenizer with the processor of its model, if that reads images; `folder`: of an adapter."""
    config = _vision_config(section)
    if config is None:
        return tokenizer
    try:
        processor = _load_processor(section, folder if folder and (folder / PROCESSOR_FILE).is_file() else None)
    except UserError as error:
        if section.processor_class is not None:
            raise
        warn_once(f"the model is trained on texts alone, and saved without a processor: {error}")
        return tokenizer
    # A processor reads options that its class has defaults of (Gemma 3's `do_pan_and_scan`) from its tokenizer.
    tokenizer.init_kwargs |= section.processor_options
    processor.tokenizer = tokenizer
    attached = attach_processor(processor, config)
    if section.processor_options:
        _try_options(ImageReader(processor, config), section.processor_options)
    return attached


def _try_options(reader: ImageReader, options: dict[str, Any]) -> None:
    """Raise for options with which a processor takes no image; warn of those that it does not name."""
    parts = [getattr(reader.processor, part, None) for part in ("image_processor", "video_processor")]
    known = {*inspect.signature(type(reader.processor).__init__).parameters, "use_fast", "backend", "padding_side"}
    known |= {name for part in parts if part is not None for name in _names_of(part)}
    for name in sorted(options.keys() - known):
        remedy = f"it may do nothing.{did_you_mean(name, sorted(known))}"
        warn_once(f"processor_kwargs: {type(reader.processor).__name__} names no option '{name}': {remedy}")
    try:
        reader.expansion(*BLANK_SIZE)
    except ValueError as error:
        raise UserError(f"processor_kwargs: {options} fail: {error}") from error


def _names_of(part: Any) -> set[str]:
    """Return the names of the options of what processes images or videos: its own, and those that a call takes."""
    return {*vars(part), *getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})}


def _vision_config(section: ModelSection) -> PreTrainedConfig | None:
    """Return the config of a model of a family that reads images; None for others, which are read no further."""
    if section.base_model is None:
        return None
    source, packed = resolve_source(section.base_model, section.gguf_file)
    file = Path(source) / "config.json"
    if packed is not None or (Path(source).is_dir() and not (file.is_file() and '"vision_config"' in file.read_text())):
        return None
    try:
        config = AutoConfig.from_pretrained(source, **hub_options(section))
    except (OSError, ValueError, ImportError):  # loading the model says what is wrong with it
        return None
    return None if vision_family(config) is None else config


def _load_processor(section: ModelSection, folder: Path | None) -> Any:
    """Load the processor of the model; a package that it lacks is named."""
    source = str(folder or resolve_source(section.base_model, None)[0])
    name = section.processor_class or "AutoProcessor"
    chosen = getattr(transformers, name, None)
    if chosen is None:
        raise UserError(f"processor_type: transformers has no class {name!r}; leave it out for AutoProcessor")
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"base_model: {source!r} reads images: {MISSING_PILLOW}")
    with load_failures("base_model", source, "processor"):
        processor = chosen.from_pretrained(source, **hub_options(section), **section.processor_options)
    if getattr(processor, "image_processor", None) is None:
        raise UserError(f"base_model: {source!r} has no processor that reads images; copy the files of the original")
    return processor


def save_processor(tokenizer: Any, folder: str) -> None:
    """Save a tokenizer, if there is one, with its processor if it has one."""
    reader = image_reader(tokenizer)
    saved = tokenizer if reader is None else reader.processor
    if saved is not None:
        saved.save_pretrained(folder)
