"""The embeddings of rows with images, and the call of the language model on them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from upweight.models.modules import backbone_of
from upweight.models.vision import Inputs, image_features, token_types, vision_family


@dataclass(frozen=True, eq=False)
class ImageRows:
    """What stands in place of token ids in a forward with images."""

    call: Callable[..., Any]
    inputs: dict[str, Any]


def image_rows(base: PreTrainedModel, images: dict[str, Any], ids_BN: Tensor) -> ImageRows:
    """Run the vision tower once for each distinct image, and put its features in place of placeholders.

    The features of a blank image stand for no token: their gradient is zero, as that of other ranks' features is not.
    Without `inputs` no token is a placeholder, but some stand after images, and have their positions.
    """
    family = vision_family(base.config)
    assert family is not None
    # Outside `tree_masks`: a tower may build masks through the same interface as the language model.
    features = None if images["inputs"] is None else image_features(base, images["inputs"])
    at_I, feature_I = images["at_I"], images["feature_I"]
    ids_N = ids_BN.flatten().index_fill(0, at_I, 0)  # a placeholder may have no row in the embeddings
    embeds_ND = base.get_input_embeddings()(ids_N.view_as(ids_BN)).flatten(0, 1)
    if features is not None:
        embeds_ND = embeds_ND.index_put((at_I,), features.embeds_ID[feature_I].to(embeds_ND.dtype))
    inputs: dict[str, Any] = {"inputs_embeds": embeds_ND.view(*ids_BN.shape, -1)}
    is_image_BN = torch.zeros_like(ids_N, dtype=torch.bool).index_fill(0, at_I, True).view_as(ids_BN)
    if features is not None and features.of_layers:
        inputs["visual_pos_masks"] = is_image_BN
        inputs["deepstack_visual_embeds"] = [layer[feature_I].to(embeds_ND.dtype) for layer in features.of_layers]
    if images["position_3BN"] is not None:
        inputs["position_ids"] = images["position_3BN"]
    if family.sees_whole_image:  # the body around the language model builds its masks
        return ImageRows(backbone_of(base), inputs | token_types(family, is_image_BN))
    return ImageRows(base.get_decoder(), inputs)


@contextmanager
def reading_blank_image(base: PreTrainedModel, inputs: Inputs) -> Iterator[None]:
    """Inside, a plain forward of texts runs the vision tower too, where one with images would: after the embeddings."""

    # Ranks whose sequences have images gather the tower's shards at this place, and all have to gather in one order.
    def run_tower(*_: Any) -> None:
        image_features(base, inputs)

    hook = base.get_input_embeddings().register_forward_hook(run_tower)
    try:
        yield
    finally:
        hook.remove()
