import pytest
import torch

from upweight.methods import METHODS, SFT, Method
from upweight.methods.base import ReferenceSync
from upweight.settings import Section, keys_of


def test_methods_are_listed_by_their_own_names():
    assert sorted(METHODS) == [
        "distill",
        "dpo",
        "ebft",
        "gdpo",
        "grpo",
        "ipo",
        "kto",
        "orm",
        "orpo",
        "prm",
        "rloo",
        "sft",
        "simpo",
    ]
    assert len({method.__name__ for method in METHODS.values()}) == len(METHODS)
    assert all(name == method.name for name, method in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_says_its_effect_in_one_or_two_sentences(name):
    for key in keys_of(METHODS[name]):
        sentence = key.field.description
        assert sentence, key.path
        assert sentence[0].isupper(), key.path
        assert sentence.endswith("."), key.path
        assert sentence.count(". ") <= 1, key.path
        assert len(sentence) <= 120, key.path


@pytest.mark.parametrize("name", METHODS)
def test_no_two_settings_of_a_method_read_the_same_path(name):
    paths = [key.path for key in keys_of(METHODS[name])]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_one_level_below_the_framework(name):
    *shared, base = METHODS[name].__bases__
    assert base is Method
    assert all(one.__bases__ == (Section,) for one in shared)


def test_a_method_has_counts_and_a_loss_and_only_an_online_one_advantages():
    class Half(Method):
        def count(self, batch):
            return {}

    with pytest.raises(TypeError, match="loss"):
        Half()
    with pytest.raises(NotImplementedError, match="sft: only online methods"):
        SFT().advantages(torch.zeros(1, 1), torch.zeros(1))


def test_learning_rates_follow_the_kind_of_method():
    rates = {name: (method.learning_rate, method.lora_learning_rate) for name, method in METHODS.items()}
    assert rates.pop("sft") == (2e-5, None)
    assert rates.pop("ebft") == (1e-6, None)
    assert {rates.pop(name) for name in ("grpo", "gdpo", "rloo", "distill")} == {(1e-6, 1e-5)}
    assert {rates.pop(name) for name in ("orm", "prm")} == {(1e-5, 1e-4)}
    assert set(rates.values()) == {(1e-6, 5e-6)}


def test_group_sizes_come_from_the_settings():
    assert {name: METHODS[name]().group_size for name in ("dpo", "grpo", "gdpo", "ebft")} == {
        "dpo": 1,
        "grpo": 8,
        "gdpo": 8,
        "ebft": 8,
    }
    assert METHODS["ebft"].model_validate({"mode": "strided"}).group_size == 4


def test_a_reference_is_asked_for_only_where_it_is_read():
    assert {name for name, method in METHODS.items() if method().needs_reference} == {"dpo", "ipo", "kto", "rloo"}


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "sync_ref_model" in method.model_fields])
def test_a_reference_follows_where_the_key_is_on(name):
    beta = {} if name in ("dpo", "ipo", "kto") else {"beta": 0.1}
    method = METHODS[name](sync_ref_model=True, ref_model_mixup_alpha=0.3, ref_model_sync_steps=7, **beta)
    assert method.reference_sync == ReferenceSync(alpha=0.3, steps=7)
