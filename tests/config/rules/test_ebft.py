"""Keys that EBFT takes over from GRPO, and those that it cannot."""

from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.config.rules import ebft
from upweight.config.rules.keys import matching
from upweight.errors import UserError
from upweight.methods import EBFT
from upweight.settings import keys_of

WHOLE = {"base_model": "m", "datasets": [{"path": "d"}], "rl": "ebft"}


def parsed(mode="structured", trl=None, **keys):
    content = {**WHOLE, "ebft": {"mode": mode, **keys}, **({"trl": trl} if trl else {})}
    return parse_config(content, folder=Path())


@pytest.mark.parametrize(
    ("mode", "trl", "reason"),
    [
        ("structured", {"reward_funcs": ["r.f"]}, "trl.reward_funcs: ebft rewards the features of true answers"),
        ("structured", {"reward_weights": [1.0]}, "trl.reward_weights: 'ebft.alignment_coef'"),
        ("structured", {"streaming_partial_batch": True}, "trl.streaming_partial_batch: features are computed from"),
        ("structured", {"reroll_start_fraction": 0.5}, "trl.reroll_start_fraction: every completion earns"),
        ("structured", {"dynamic_sampling_max_rounds": 2}, "trl.dynamic_sampling_max_rounds: completions of a group"),
        ("strided", {"async_prefetch": True}, "trl.async_prefetch: strided mode has no correction"),
    ],
)
def test_what_cannot_act_is_refused_with_a_reason(mode, trl, reason):
    with pytest.raises(UserError, match=reason):
        parsed(mode, trl)


@pytest.mark.parametrize(
    ("mode", "trl", "keys", "odd"),
    [
        ("structured", {}, {"stride": 4, "top_p": 0.9}, ["ebft.stride, ebft.top_p"]),
        ("strided", {"beta": 0.1}, {"gt_length_multiplier": 2.0}, ["ebft.gt_length_multiplier, trl.beta"]),
        ("structured", {"use_vllm": True, "temperature": 0.7}, {"gt_length_multiplier": 2.0}, []),
        ("strided", {"compile_sampler": False, "reroll_start_fraction": 1}, {"stride": 4}, []),
    ],
)
def test_keys_of_the_other_mode_are_told_of(mode, trl, keys, odd):
    found = [notice.split(":")[0] for notice in parsed(mode, trl, **keys).notices if "no effect with" in notice]
    assert found == odd


@pytest.mark.parametrize(
    ("trl", "keys", "estimator"),
    [
        ({}, {}, "rloo"),
        ({"scale_rewards": True}, {}, "group_norm"),
        ({"scale_rewards": False}, {}, "rloo"),
        ({"advantage_estimator": "group"}, {}, "group_norm"),
        ({"advantage_estimator": "rloo", "scale_rewards": True}, {}, "rloo"),
        ({"scale_rewards": True}, {"advantage_estimator": "rloo"}, "rloo"),
        ({}, {"advantage_estimator": "grpo"}, "group_norm"),
    ],
)
def test_the_baseline_is_leave_one_out_unless_the_config_says_otherwise(trl, keys, estimator):
    assert getattr(parsed(trl=trl, **keys).method, "baseline") == estimator  # noqa: B009


@pytest.mark.parametrize("patterns", [ebft.ONLY_STRIDED, ebft.ONLY_STRUCTURED])
def test_other_spellings_of_keys_without_effect_are_named_too(patterns):
    aliases = [(key.path, key.canonical) for key in keys_of(EBFT) if key.path != key.canonical]
    assert aliases
    for path, canonical in aliases:
        assert bool(matching([path], patterns)) == bool(matching([canonical], patterns)), path
