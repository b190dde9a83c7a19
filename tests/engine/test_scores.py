import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from tiny_models import SIZES, gradients, relative_difference, staircase, three_levels, tiny, weighted
from upweight.engine import Engine
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.models.modules import unwrap_peft


def own_scores(model, units):
    """The model's own score of every scored position, from a text that ends there."""
    found = []
    for item in (item for unit in units for item in unit.samples):
        for at in np.flatnonzero(item.loss_mask):
            logits = model(input_ids=torch.from_numpy(item.ids[: at + 1])[None], use_cache=False).logits
            found.append(logits.reshape(-1, logits.shape[-1])[-1:])
    return torch.cat(found)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("llama", "SequenceClassification"),
        ("llama", "TokenClassification"),
        ("modernbert-decoder", "SequenceClassification"),
        ("qwen3_next", "SequenceClassification"),
    ],
)
def test_scores_and_gradients_are_those_of_the_models_own_forward(kind, task, adapter):
    model = tiny(kind, getattr(hf, f"AutoModelFor{task}"), num_labels=2, pad_token_id=60)  # a token of the texts, too
    if adapter:
        layers = [name for name in ("head", "score", "classifier") if hasattr(model, name)]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=layers))
    engine = Engine(model)
    units = three_levels() + staircase()
    ours = engine(model, build_batch(units, engine.layout, predict=False)).scores_TC
    unwrap_peft(model).config.pad_token_id = 0
    plain = own_scores(model, units)
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)
    found, right = (gradients(model, weighted({"scores_TC": x})) for x in (ours, plain))
    assert relative_difference(found, right) < 1e-4
    if kind == "modernbert-decoder":
        assert any(".head." in f".{name}" and bool(grad.any()) for name, grad in found.items())


def test_a_config_without_a_padding_token_serves_and_stays_as_it_is():
    model = tiny("llama", hf.AutoModelForSequenceClassification, num_labels=1, pad_token_id=None)
    units = three_levels()
    ours = Engine(model)(model, build_batch(units, predict=False)).scores_TC
    torch.testing.assert_close(ours, own_scores(model, units), atol=1e-5, rtol=1e-4)
    assert model.config.pad_token_id is None


@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta-v2"])
def test_a_class_that_scores_something_else_than_its_last_token_is_refused(kind):
    model = hf.AutoModelForSequenceClassification.from_config(hf.AutoConfig.for_model(kind, **SIZES, num_labels=1))
    with pytest.raises(UserError, match=r"neither a text by its last token.*decoder model"):
        Engine(model)
