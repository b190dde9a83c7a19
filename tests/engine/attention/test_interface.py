import copy

import pytest
import torch

from tiny_models import drawn, group, tiny
from upweight.engine import Engine
from upweight.engine.attention.interface import NAME, register, stock_of
from upweight.engine.packing import build_batch


def test_names_are_plain_words_and_remember_their_stock():
    names = {stock: register(stock) for stock in ("sdpa", "eager", "flash_attention_2")}
    assert len(set(names.values())) == 3
    for stock, name in names.items():
        assert name.startswith(NAME)
        assert not any(word in name for word in ("/", "flash", "sdpa", "flex"))
        assert register(stock) == name
        assert stock_of(name) == stock
    assert stock_of("sdpa") == "sdpa"


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma3_text"])
def test_without_our_argument_a_model_is_untouched(kind):
    model = tiny(kind)
    ids = torch.from_numpy(drawn(0, 14))[None]
    padded = torch.tensor([[1] * 14, [0] * 4 + [1] * 10])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    before = model(ids).logits, model(ids.repeat(2, 1), attention_mask=padded).logits, model.generate(ids, **options)
    engine = Engine(model)
    engine(model, build_batch(group()))
    after = model(ids).logits, model(ids.repeat(2, 1), attention_mask=padded).logits, model.generate(ids, **options)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def test_a_deep_copy_runs_its_own_weights():
    model = tiny("llama")
    engine = Engine(model)
    batch = build_batch(group())
    before = engine(model, batch).logps_T
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.mul_(-1)
    assert torch.equal(engine(other, batch).logps_T, before)
    assert not torch.equal(engine(model, batch).logps_T, before)


def test_another_implementation_set_in_between_is_replaced():
    model = tiny("llama")
    engine = Engine(model)
    batch = build_batch(group())
    before = engine(model, batch).logps_T
    model.set_attn_implementation("eager")
    torch.testing.assert_close(engine(model, batch).logps_T, before)
