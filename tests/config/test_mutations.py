"""Configs spoilt in every way still end in a user error or in a config, never in a traceback."""

import copy
import random
from pathlib import Path

import pytest
import yaml

from upweight.config import load_config, parse_config
from upweight.errors import UserError

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.yaml"))
FREE_KEYS = {"roles", "message_property_mappings", "gradient_checkpointing_kwargs"}
ODD_VALUES = (
    None, True, False, 0, -1, 3.7, 1e308, 10**40, float("inf"), float("nan"), "", "x" * 10_000, "é\u200b\ud800",
    [], [[]], {}, {"a": {"b": [1]}}, [None], ["x", 1], {1: 2}, b"bytes", (1,),
)  # fmt: skip


def places(content, above=()):
    """Every path in nested mappings and lists."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from places(value, (*above, key))


def holder_of(content, path):
    for part in path[:-1]:
        content = content[part]
    return content


def outcome(content) -> str:
    try:
        parse_config(content, folder=Path(), fragment=True)
    except UserError as error:
        return str(error)
    return ""


def misspelt(word: str, chance: random.Random) -> str:
    at = chance.randrange(len(word) - 1)
    return chance.choice(
        [
            word[:at] + word[at + 1 :],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at] + word[at:],
            word[:at] + chance.choice("abcdefghijklmnop") + word[at + 1 :],
        ]
    )


def test_samples_are_valid():
    for sample in SAMPLES:
        load_config(sample)


@pytest.mark.parametrize("seed", range(3))
def test_a_typo_in_any_key_is_refused_and_the_right_key_named(seed):
    chance = random.Random(seed)
    tried, named = 0, 0
    for sample in SAMPLES:
        original = yaml.safe_load(sample.read_text())
        for path in places(original):
            key = path[-1]
            if not isinstance(key, str) or FREE_KEYS & set(path[:-1]):
                continue
            content = copy.deepcopy(original)
            holder, wrong = holder_of(content, path), misspelt(key, chance)
            if wrong in holder:
                continue
            holder[wrong] = holder.pop(key)
            message = outcome(content)
            assert message, f"{path} as '{wrong}' was accepted"
            tried += 1
            named += f"'{key}'" in message or f".{key}'" in message
    assert named / tried > 0.95


def test_a_thousand_spoilt_configs_give_no_traceback():
    chance = random.Random(1)
    originals = [yaml.safe_load(sample.read_text()) for sample in SAMPLES]
    for _ in range(1000):
        content = copy.deepcopy(chance.choice(originals))
        for _ in range(chance.randint(1, 3)):
            path = chance.choice(list(places(content)))
            holder = holder_of(content, path)
            value = chance.choice(ODD_VALUES)
            change = chance.randrange(4)
            if change == 0:
                holder[path[-1]] = value
            elif change == 1:
                del holder[path[-1]]
            elif change == 2:
                holder[path[-1]] = [holder[path[-1]]]
            elif isinstance(holder, dict):
                holder[chance.choice([1, None, True, 2.5, "", "a.b", "trl", (1, 2)])] = value
        outcome(content)


def test_spoilt_text_gives_no_traceback(tmp_path):
    chance = random.Random(1)
    file = tmp_path / "c.yaml"
    texts = [sample.read_text() for sample in SAMPLES]
    refused = 0
    for _ in range(150):
        text = list(chance.choice(texts))
        for _ in range(chance.randint(1, 6)):
            text[chance.randrange(len(text))] = chance.choice("{}[]:,-&*!|>'\"%@`#?\t\n \x00é")
        file.write_text("".join(text))
        try:
            load_config(file)
        except UserError:
            refused += 1
    assert refused > 50
