import logging

import pytest
import torch
import transformers as hf
from peft import PromptTuningConfig, TaskType, get_peft_model

from tiny_models import (
    PADDED,
    SIZES,
    TREES,
    TREES_TOO,
    drawn,
    plain_statistics,
    sample,
    staircase,
    three_levels,
    tiny,
)
from upweight.engine import Engine
from upweight.engine.check import check_first_batch
from upweight.engine.layout import choose_layout, why_not_trees
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.types import Unit


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


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            "llama",
            {
                "max_position_embeddings": 16,
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {**_LONG, "original_max_position_embeddings": 16},
            },
        ),
    ],
)
def test_rotary_embeddings_scale_by_each_sequence_whatever_was_forwarded_with_it_or_before(kind, changes):
    model = tiny(kind, **changes)
    engine = Engine(model)
    assert engine.layout == "padded"
    units = [*three_levels(), *staircase(), Unit((sample(drawn(99, 40), prompt=3),))]
    ours = engine(model, build_batch(units, "padded")).logps_T
    plain = plain_statistics(tiny(kind, **changes), units[-1:])["logps_T"]  # one that has seen nothing else
    torch.testing.assert_close(ours[-len(plain) :], plain, atol=2e-5, rtol=1e-4)
    alone = torch.cat([engine(model, build_batch([unit], "padded")).logps_T for unit in units])
    torch.testing.assert_close(ours, alone, atol=2e-5, rtol=1e-4)
    check_first_batch(engine, model, build_batch(units, "padded")).require()


def test_a_scale_by_place_in_the_row_becomes_one_by_position():
    model = tiny("llama4_text", attn_temperature_tuning=True, floor_scale=4, no_rope_layers=[1, 0, 1])
    engine = Engine(model)
    assert engine.layout == "tree"
    units = three_levels() + staircase()
    ours = engine(model, build_batch(units)).logps_T
    torch.testing.assert_close(ours, plain_statistics(model, units)["logps_T"], atol=2e-5, rtol=1e-4)


def test_a_model_that_drops_forward_arguments_shares():
    config = hf.NemotronConfig(**SIZES)
    torch.manual_seed(0)
    model = hf.NemotronForCausalLM(config).eval()
    units = three_levels() + staircase()
    ours = Engine(model)(model, build_batch(units)).logps_T
    torch.testing.assert_close(ours, plain_statistics(model, units)["logps_T"], atol=2e-5, rtol=1e-4)


def test_a_model_without_gradients_in_evaluation_mode_is_refused_in_words():
    model = tiny("llama")
    model.config.model_type = "reformer"
    with pytest.raises(UserError, match="name another model"):
        Engine(model)


def test_positions_that_are_counted_from_the_padding_token_are_left_to_the_model():
    def make():
        torch.manual_seed(0)
        config = hf.RobertaConfig(**SIZES, is_decoder=True, initializer_range=0.3)
        return hf.RobertaForCausalLM(config).eval()

    model, units = make(), three_levels() + staircase()
    engine = Engine(model)
    assert engine.layout == "padded"
    ours = engine(model, build_batch(units, "padded")).logps_T
    torch.testing.assert_close(ours, plain_statistics(make(), units)["logps_T"], atol=2e-5, rtol=1e-4)
