"""The image by which vLLM and the trainer are compared: it is resized everywhere, it is small, and what it says."""

from functools import partial

import pytest
import torch

pytest.importorskip("PIL")

import transformers as hf
from peft import LoraConfig, get_peft_model
from PIL import Image

from made_vllm import FakeVllm
from tiny_vision import KINDS, config, processor, tiling_processor, vision_model
from upweight import log
from upweight.models.processor import ImageReader, attach_processor, image_reader
from upweight.models.vision import freeze_vision
from upweight.rollout.vllm.image_probe import NEARLY_SQUARE, SMALL, TALL, ImageProbe, image_probe, resizing
from upweight.rollout.vllm.images import ImagePrompts
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.token_route import GENERATE

CROP = {"height": 336, "width": 336}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PIXTRAL, QWEN = hf.PixtralImageProcessorPil, hf.Qwen2VLImageProcessorPil
TILES = partial(partial, tiling_processor)  # made where it is used, since it may not be there
# As published: the kind, the image processor, what its processor counts tokens by, and the most tokens of the probe.
PUBLISHED = {
    "LLaVA 1.5": (
        "llava",
        hf.CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size=CROP),
        {"patch_size": 14},
        580,
    ),
    "LLaVA-NeXT": (
        "llava_next",
        hf.LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size=CROP, image_grid_pinpoints=PINPOINTS),
        {"patch_size": 14},
        1100,
    ),
    "Mistral Small 3.1": (
        "mistral3",
        PIXTRAL(size={"longest_edge": 1540}, patch_size={"height": 14, "width": 14}),
        {"patch_size": 14},
        140,
    ),
    "Pixtral 12B": (
        "mistral3",
        PIXTRAL(size={"longest_edge": 1024}, patch_size={"height": 16, "width": 16}),
        {"patch_size": 16, "spatial_merge_size": 1},
        410,
    ),
    "Idefics3 8B": (
        "idefics3",
        TILES(size={"longest_edge": 1456}, max_image_size={"longest_edge": 364}),
        {"image_seq_len": 169},
        870,
    ),
    "SmolVLM2": (
        "smolvlm",
        TILES(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}),
        {"image_seq_len": 64},
        340,
    ),
    "Qwen2.5-VL": ("qwen2_5_vl", QWEN(size={"shortest_edge": 3136, "longest_edge": 12845056}), {}, 100),
    "Qwen3-VL": ("qwen3_vl", QWEN(patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}), {}, 90),
    "Gemma 3": (
        "gemma3",
        hf.Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
        {"full_image_sequence": "\n\n<boi>" + "<image>" * 256 + "<eoi>\n\n"},
        270,
    ),
    "InternVL3": (
        "internvl",
        hf.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, max_patches=12),
        {"image_seq_length": 256},
        270,
    ),
}
BOTH_WAYS = {"LLaVA-NeXT", "Qwen2.5-VL", "Qwen3-VL", "Gemma 3", "InternVL3"}  # of whose images, one side is stretched


def reader_of(kind: str) -> ImageReader:
    return image_reader(attach_processor(processor(kind), config(kind)))


def published(name: str) -> tuple[ImageReader, int]:
    """A reader of images with published settings, and the most tokens of its probe."""
    kind, images, counts, most = PUBLISHED[name]
    reader = reader_of(kind)
    reader.processor.image_processor = images() if isinstance(images, partial) else images
    vars(reader.processor).update(counts)
    return reader, most


def resized(reader: ImageReader, probe: ImageProbe) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The widths and heights before and after each resizing of a probe's image that changes them."""
    images, seen = reader.processor.image_processor, []
    own = images.resize

    def resize(image, *args, **options):
        out = own(image, *args, **options)
        seen.append((image.shape[-1:-3:-1], out.shape[-1:-3:-1]))
        return out

    images.resize = resize
    try:
        probe.comparison(probe.prompt, [], 1.0, adapted=False)
    finally:
        del images.resize
    return [(before, after) for before, after in seen if before != after]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_processors_resize_the_image_into_few_tokens(name):
    reader, most = published(name)
    probe = image_probe(ImagePrompts(reader), 1.0, None)
    assert len(probe.prompt) <= most
    changes = resized(reader, probe)
    assert changes
    both = [one for one in changes if one[0][0] < one[1][0] and one[0][1] > one[1][1]]
    assert bool(both) == (name in BOTH_WAYS)


@pytest.mark.parametrize("size", [TALL, NEARLY_SQUARE, SMALL])
@pytest.mark.parametrize("kind", KINDS)
def test_another_filter_shows_in_every_family(kind, size):
    reader = reader_of(kind)
    probe = ImageProbe(ImagePrompts(reader), 1.0, size)
    assert resized(reader, probe)
    images, pixels = reader.processor.image_processor, []
    for images.resample in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS):
        pixels.append(probe.comparison(probe.prompt, [], 1.0, adapted=False).keywords["images"]["pixel_values"])
    for one, other in (pixels[:2], pixels[1:]):
        assert ((one - other).abs() > 0.02).float().mean() > 0.01  # one level of 255 is 0.008 to 0.015


def test_a_short_server_gets_a_small_image_or_none(caplog, monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    prompts = ImagePrompts(published("Qwen2.5-VL")[0])
    lengths = [image_probe(prompts, 1.0, longest).length for longest in (None, 400, 116, 115)]
    assert lengths == [116, 116, 116, 24]  # 96 and 4 tokens of an image, 4 of text and 16 new ones
    assert not caplog.text
    assert image_probe(prompts, 1.0, 23) is None
    assert "not compared after an image, which takes 24 tokens where vLLM takes 23: vllm.max_model_len" in caplog.text


def test_half_precision_shows_only_a_large_difference(caplog, monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    for mean, words in ((0.02, "log-probs in half precision: they do not show whether"), (0.15, "differ by 0.15 on")):
        probe = image_probe(ImagePrompts(reader_of("llava")), 1.0, None)
        assert probe.agrees(mean, 2 * mean, exact=False)
        assert words in caplog.text
    assert not image_probe(ImagePrompts(reader_of("llava")), 1.0, None).agrees(0.3, 0.4, exact=False)
    assert len(caplog.records) == 2


def test_a_type_whose_images_are_seen_whole_has_a_second_cause(caplog, monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    for kind, named in (("llava", False), ("gemma3", True)):
        caplog.clear()
        assert image_probe(ImagePrompts(reader_of(kind)), 1.0, None).agrees(0.02, 0.05, exact=True)
        assert ("on a CPU lets tokens of an image see only those before them" in caplog.text) == named


def test_the_library_that_resizes_here_is_named():
    said = resizing(processor("llava").image_processor)
    assert said.startswith("Here Pillow ")
    assert said.endswith("with the same processor_config.json")


@pytest.mark.parametrize("resample", [None, Image.Resampling.BILINEAR])
def test_a_server_that_resizes_in_another_way_is_warned_of(resample, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(log, "_warned", set())
    model = vision_model("idefics3")
    model.save_pretrained(tmp_path / "model")
    model.config.name_or_path = str(tmp_path / "model")
    tokenizer = attach_processor(processor("idefics3"), model.config)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", exclude_modules=freeze_vision(model)))
    its = processor("idefics3")
    its.image_processor.resample = resample or its.image_processor.resample
    fake = FakeVllm(tmp_path / "model", reader=image_reader(attach_processor(its, model.config)))
    options = {"dtype": torch.float32, "folder": tmp_path / "w", "timeout": 5.0, "probes_images": True}
    try:
        VllmServer(fake.url, model, tokenizer, **options)
    finally:
        fake.close()
    assert len(fake.asked(GENERATE)) == 1
    assert ("prepares images in another way. Here Pillow" in caplog.text) == (resample is not None)
