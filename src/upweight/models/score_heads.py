"""Score heads for vision-language models: transformers has classifiers for text models, and for few others."""

from typing import Any

from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS

from upweight.models.vision import vision_family


def add_score_class(config: PreTrainedConfig) -> None:
    """Let `AutoModelForSequenceClassification` load a vision-language model of which transformers has no classifier.

    The class is transformers' own for classifiers, around the same body, so that weights keep their names.
    """
    if vision_family(config) is None or type(config) in CLASSIFIERS:
        return
    body: Any = AutoModel._model_mapping[type(config)]
    family = next(base for base in body.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = body.__name__.removesuffix("Model") + "ForSequenceClassification"
    made = type(name, (GenericForSequenceClassification, family), {"__module__": __name__})
    AutoModelForSequenceClassification.register(type(config), made, exist_ok=True)  # of a config of transformers
