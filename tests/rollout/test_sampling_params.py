"""Sampling options from a config."""

import pytest

from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.rollout.sampling_params import build_sampling
from upweight.types import Sampling


def test_a_plain_section_samples_at_temperature_one():
    assert build_sampling(RolloutSection(), 64) == Sampling(64)


def test_every_key_reaches_the_sampler():
    section = RolloutSection(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
    assert build_sampling(section, 8) == Sampling(8, 0.7, 0.9, 20, 0.05, 1.1)


def test_generation_kwargs_have_the_last_word_under_any_spelling():
    given = {"temperature": 1, "max_tokens": 5, "stop": "END", "stop_token_ids": [3, 4], "do_sample": True}
    sampling = build_sampling(RolloutSection(temperature=0.5, generation_args=given), 64)
    assert sampling == Sampling(5, 1.0, stop_strings=("END",), stop_ids=(3, 4))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temprature": 1.0}, "Did you mean 'temperature'"),
        ({"do_sample": False}, "makes all completions of a group alike"),
        ({"stop": [1]}, "'stop' must be str or a list"),
        ({"top_k": "many"}, "'top_k' must be int"),
        ({"temperature": 0}, "'temperature': Input should be greater than 0, got 0"),
        ({"top_p": 2.0}, "'top_p': Input should be less than or equal to 1"),
        ({"min_p": -0.1}, "'min_p': Input should be greater than or equal to 0"),
    ],
)
def test_what_the_sampler_does_not_know_is_refused(given, says):
    with pytest.raises(UserError, match=says):
        build_sampling(RolloutSection(generation_args=given), 8)
