"""Tiny vision-language models and their processors, built in code; they need Pillow alone."""

import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available

SPECIAL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<image>",
    "<video>",
    "<fake>",
    "<global-img>",
    "<boi>",
    "<eoi>",
    "<user>",
    "<bot>",
]
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 258,
}  # fmt: skip
KINDS = (
    "llava",
    "llava_next",
    "mistral3",
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
    "internvl",
)
# The published classes of processors that read videos too, and what they are made with.
WITH_VIDEOS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "internvl": ("InternVLProcessor", "InternVLVideoProcessor", ("image_seq_length",)),
    "smolvlm": ("SmolVLMProcessor", "SmolVLMVideoProcessor", ("image_seq_len",)),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor", ()),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", ()),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor", ()),
}
PINPOINTS = [[32, 64], [64, 32], [64, 64]]  # sizes that images of LLaVA-NeXT are cut from
TEMPLATE = (
    "{% for m in messages %}<{{ 'bot' if m['role'] == 'assistant' else 'user' }}>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}PLACEHOLDER{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def tokenizer(kind: str = "llava") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the special tokens of all kinds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens([*SPECIAL, *TILES])
    named = {}
    if kind == "gemma3":
        named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
        bytes_alone.add_tokens(["\n" * number for number in range(1, 5)])  # which vLLM looks for
    if kind == "internvl":
        named = {"start_image_token": "<boi>", "end_image_token": "<eoi>", "context_image_token": "<image>"}
        named |= {"video_token": "<video>"}
    if kind.startswith("qwen"):
        named = {"image_token": "<image>", "video_token": "<video>"}
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, extra_special_tokens=named or SPECIAL[3:], **tokens)
    made.chat_template = TEMPLATE.replace("PLACEHOLDER", {"gemma3": "<boi>"}.get(kind, "<image>"))
    return made


def without_video(kind: type) -> type:
    """A processor class that takes no video processor, which would need torchvision; it is saved without one."""

    def save_pretrained(self, folder) -> None:
        self.tokenizer.save_pretrained(folder)
        (Path(folder) / "processor_config.json").write_text("{}")

    taken = {"check_argument_for_proper_class": lambda self, name, value: value, "save_pretrained": save_pretrained}
    return type(kind.__name__, (kind,), taken)


@cache
def pixtral_processor() -> type:
    """The class, whose file imports torchvision for another one; an installed torchvision is taken."""
    if is_torchvision_available():
        return hf.PixtralProcessor
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    for name in names:
        sys.modules[name] = ModuleType(name)
    vars(sys.modules[names[-1]])["functional"] = None
    try:
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    finally:
        for name in names:
            del sys.modules[name]
    return PixtralProcessor


def tiling_processor(**options: Any):
    """The image processor of Idefics3 and SmolVLM; transformers before 5.18 has it only where torchvision is."""
    try:
        return hf.Idefics3ImageProcessorPil(**options)
    except ImportError:
        import pytest  # which the bench's environment of TRL does not have

        pytest.skip("the image processor of Idefics3 needs torchvision")


def processor(kind: str):
    """The processor of a kind, with images of a few tokens."""
    words = tokenizer(kind)
    words_and = {"tokenizer": words, "chat_template": words.chat_template}
    if kind == "llava":
        size = {"height": 32, "width": 32}
        images = hf.CLIPImageProcessorPil(size=size, crop_size=size)
        options = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        return hf.LlavaProcessor(images, **options, **words_and)
    if kind == "llava_next":
        size, crop = {"shortest_edge": 32}, {"height": 32, "width": 32}
        images = hf.LlavaNextImageProcessorPil(size=size, crop_size=crop, image_grid_pinpoints=PINPOINTS)
        options = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        return hf.LlavaNextProcessor(images, **options, **words_and)
    if kind == "mistral3":
        images = hf.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
        tokens = {"image_token": "<image>", "image_break_token": "<fake>", "image_end_token": "<eoi>"}
        return pixtral_processor()(images, patch_size=8, spatial_merge_size=2, **tokens, **words_and)
    if kind in ("idefics3", "smolvlm"):
        images = tiling_processor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
        words.add_special_tokens({"extra_special_tokens": ["<fake_token_around_image>", "<end_of_utterance>"]})
        return hf.Idefics3Processor(images, image_seq_len=4, **words_and)
    if kind == "gemma3":
        images = hf.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
        return hf.Gemma3Processor(images, image_seq_length=4, **words_and)
    if kind == "internvl":
        images = hf.GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=4)
        return without_video(hf.InternVLProcessor)(images, video_processor=None, image_seq_length=4, **words_and)
    patch = 16 if kind == "qwen3_vl" else 14
    size = {"shortest_edge": 8 * patch**2, "longest_edge": 64 * patch**2}
    images = hf.Qwen2VLImageProcessorPil(patch_size=patch, size=size)
    kinds = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    return without_video(getattr(hf, kinds[kind]))(images, video_processor=None, **words_and)


def published_processor(kind: str):
    """The processor that goes with `save_published`; SmolVLM's halves images as Pillow and torchvision do alike."""
    made = processor(kind)
    if kind == "smolvlm":  # which resizes every image it cuts into tiles
        made.image_processor.resample = Image.Resampling.BILINEAR
    return made


def config(kind: str):
    """The config of a kind."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = {**vision, "image_size": 32, "patch_size": 8}
    llama, image = {**TEXT, "model_type": "llama"}, {"image_token_id": 259}
    if kind == "llava":
        tower = {**small, "model_type": "clip_vision_model", "projection_dim": 32}
        return hf.LlavaConfig(vision_config=tower, text_config=llama, image_token_index=259, vision_feature_layer=-1)
    if kind == "llava_next":
        tower = {**small, "model_type": "clip_vision_model", "projection_dim": 32}
        options = {"image_token_index": 259, "vision_feature_layer": -1, "image_grid_pinpoints": PINPOINTS}
        return hf.LlavaNextConfig(vision_config=tower, text_config=llama, **options)
    if kind == "mistral3":
        tower = {**vision, "model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 8}
        options = {"image_token_index": 259, "vision_feature_layer": -1, "spatial_merge_size": 2}
        return hf.Mistral3Config(vision_config=tower, text_config=llama, **options)
    if kind in ("idefics3", "smolvlm"):
        classes = {"idefics3": hf.Idefics3Config, "smolvlm": hf.SmolVLMConfig}
        return classes[kind](vision_config=small, text_config=llama, scale_factor=2, pad_token_id=256, **image)
    if kind == "gemma3":
        text = {**TEXT, "head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
        text |= {"num_hidden_layers": 4}
        tower = {**small, "vision_use_head": False}
        tokens = {"boi_token_index": 263, "eoi_token_index": 264, "image_token_index": 259}
        return hf.Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **tokens)
    if kind == "internvl":
        tower = {**vision, "image_size": [32, 32], "patch_size": [8, 8]}
        return hf.InternVLConfig(vision_config=tower, text_config=llama, downsample_ratio=0.5, **image)
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    tokens = {**image, "video_token_id": 260, "vision_start_token_id": 263, "vision_end_token_id": 264}
    if kind == "qwen2_vl":
        tower = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
        return hf.Qwen2VLConfig(text_config=text, vision_config=tower, **tokens)
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
    if kind == "qwen2_5_vl":
        tower |= {"depth": 2, "window_size": 56, "fullatt_block_indexes": [1]}
        return hf.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **tokens)
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tower |= {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return hf.Qwen3VLConfig(text_config={**text, "head_dim": 8}, vision_config=tower, **tokens)


def wide_config(kind: str):
    """The config of a kind with heads of 32, the least that vLLM's attention on CPUs takes."""
    made = config(kind)
    made.text_config.hidden_size, made.text_config.head_dim, made.text_config.num_hidden_layers = 128, 32, 2
    made.vision_config.hidden_size = 128  # for Qwen2-VL, that of its features
    if kind.startswith("qwen"):
        made.text_config.rope_parameters["mrope_section"] = [8, 4, 4] if kind == "qwen3_vl" else [4, 4, 8]
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        made.vision_config.out_hidden_size = 128
    if kind == "mistral3":
        made.vision_config.head_dim = 32
    if kind in ("gemma3", "qwen2_vl", "qwen2_5_vl"):
        made.text_config.layer_types = made.text_config.layer_types[:2]
    return made


def vision_model(kind: str, seed: int = 0, settings=None):
    """A model of a kind in float32, in evaluation mode, whose weights are large enough for images to matter."""
    torch.manual_seed(seed)
    model = hf.AutoModelForImageTextToText.from_config(settings or config(kind)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1)
    return model


def save_published(kind: str, folder: Path) -> None:
    """Write a wide model and its processor as models are published: CLIP's and SigLIP's weights a level further down.

    transformers leaves that level out of models that were made in code, and keeps it in those that were loaded with it.
    """
    settings = wide_config(kind)
    settings.tie_word_embeddings = False  # vLLM does not renew a tied head on a CPU
    vision_model(kind, settings=settings).save_pretrained(folder)
    file = folder / "model.safetensors"
    if kind in ("gemma3", "llava", "llava_next"):
        weights = load_file(file)
        names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights}
        save_file({names[name]: weight for name, weight in weights.items()}, file, {"format": "pt"})
    made = published_processor(kind)
    made.save_pretrained(folder)
    if kind in WITH_VIDEOS:  # its class is read from there, and one for videos, without which it is not made
        own, videos, sizes = WITH_VIDEOS[kind]
        parts = {"image_processor": json.loads(made.image_processor.to_json_string())}
        parts["video_processor"] = {"video_processor_type": videos}
        content = {"processor_class": own, **{name: getattr(made, name) for name in sizes}, **parts}
        (folder / "processor_config.json").write_text(json.dumps(content))


@cache
def drawn_image(seed: int, width: int = 48, height: int = 32) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))
