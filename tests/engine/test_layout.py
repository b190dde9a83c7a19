import logging

import pytest
import transformers as hf
from peft import PromptTuningConfig, TaskType, get_peft_model

from tiny_models import PADDED, TREES, TREES_TOO, tiny
from upweight.engine import Engine
from upweight.engine.layout import choose_layout, why_not_trees
from upweight.errors import UserError


@pytest.mark.parametrize("kind", [*TREES, *TREES_TOO])
def test_attention_models_share(kind):
    assert why_not_trees(tiny(kind)) is None


@pytest.mark.parametrize("kind", PADDED)
def test_recurrent_models_are_padded_and_say_why(kind, caplog):
    with caplog.at_level(logging.WARNING, "upweight"):
        assert Engine(tiny(kind)).layout == "padded"
    assert "linear_attention" in caplog.text
    with pytest.raises(UserError, match="cannot share"):
        choose_layout(tiny(kind), "tree", None)


def test_attention_outside_the_interface_is_padded():
    config = hf.GPTJConfig(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=32, rotary_dim=8)
    assert "interface" in str(why_not_trees(hf.GPTJForCausalLM(config)))


def test_padding_can_be_asked_for():
    model = tiny("llama")
    assert Engine(model, layout="padded").layout == "padded"
    assert model.config._attn_implementation == "sdpa"


def test_length_dependent_rotary_embeddings_share_below_their_limit():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("llama", rope_parameters=rope)
    assert "rotary" in str(why_not_trees(model))
    assert why_not_trees(model, longest=256) is None
    assert "rotary" in str(why_not_trees(model, longest=257))


def test_soft_capped_attention_never_runs_on_sdpa():
    model = tiny("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    choose_layout(model, "padded", None)
    assert model.config._attn_implementation == "eager"


def test_encoder_decoders_and_prompt_tuning_are_refused():
    config = hf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="encoder-decoder"):
        Engine(hf.T5ForConditionalGeneration(config))
    prompts = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(UserError, match="LoRA"):
        Engine(get_peft_model(tiny("llama"), prompts))
