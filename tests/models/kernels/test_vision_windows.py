import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("PIL")

from tiny_vision import drawn_image, processor, vision_model
from upweight.models.modules import backbone_of
from upweight.models.vision import FAMILIES, image_features

SIZES = ((64, 96), (112, 112), (40, 56), (112, 84), (64, 96))


class Attentions(TorchDispatchMode):
    """Counts calls of attention."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


def inputs_of(kind):
    images = [drawn_image(number, *size) for number, size in enumerate(SIZES)]
    read = processor(kind).image_processor(images=images, return_tensors="pt")
    return {name: read[name] for name in FAMILIES[kind].inputs}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_features_and_gradients_are_those_of_one_window_after_the_other(kind):
    model, inputs = vision_model(kind), inputs_of(kind)
    tower = backbone_of(model).visual

    def run(features):
        model.zero_grad()
        with Attentions() as attentions:
            embeds = features()
        embeds.square().sum().backward()
        return embeds.detach(), {name: weight.grad for name, weight in tower.named_parameters()}, attentions.count

    def stock():
        return torch.cat(list(backbone_of(model).get_image_features(**inputs, return_dict=True).pooler_output))

    assert "windows" not in tower.config._attn_implementation
    embeds, gradients, count = run(stock)
    joined, joined_gradients, fewer = run(lambda: image_features(model, inputs).embeds_ID)
    assert "windows" in tower.config._attn_implementation
    assert torch.allclose(joined, embeds, atol=1e-5)
    for name, gradient in gradients.items():
        if gradient is None:
            assert joined_gradients[name] is None
        else:
            assert torch.allclose(joined_gradients[name], gradient, atol=1e-4, rtol=1e-4), name
    assert fewer < count


def test_a_language_model_keeps_its_attention():
    model = vision_model("qwen2_5_vl")
    before = model.config.get_text_config()._attn_implementation
    image_features(model, inputs_of("qwen2_5_vl"))
    assert model.config.get_text_config()._attn_implementation == before
