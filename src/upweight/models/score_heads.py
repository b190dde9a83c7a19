"""Score heads for vision-language models: transformers has classifiers for text models, and for few others."""

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from upweight.config.rules.model import ENDINGS, Head
from upweight.models.vision import vision_family

# By head: transformers' class that chooses by the config, and its code for any body.
CLASSES: dict[Head, tuple[Any, type]] = {
    "sequence_score": (AutoModelForSequenceClassification, GenericForSequenceClassification),
    "step_score": (AutoModelForTokenClassification, GenericForTokenClassification),
}


def add_score_class(config: PreTrainedConfig, head: Head = "sequence_score") -> None:
    """Let transformers' Auto class load a vision-language model of which it has no classifier with this head.

    The class is transformers' own for classifiers, around the same body, so that weights keep their names.
    """
    auto, generic = CLASSES[head]
    if vision_family(config) is None or type(config) in auto._model_mapping:
        return
    body: Any = AutoModel._model_mapping[type(config)]
    family = next(base for base in body.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = body.__name__.removesuffix("Model") + ENDINGS[head]
    made = type(name, (generic, family), {"__module__": __name__})
    auto.register(type(config), made, exist_ok=True)  # of a config of transformers
