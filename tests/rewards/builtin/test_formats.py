"""Rewards for the shape of a completion."""

import pytest

from upweight.rewards.builtin.formats import (
    FormatReward,
    IncrementalFormatReward,
    JsonReward,
    RegexReward,
    XmlTagsReward,
)

GOOD = "<reasoning>\nr\n</reasoning>\n<answer>\na\n</answer>\n"


@pytest.mark.parametrize(
    ("text", "whole", "anywhere"),
    [
        (GOOD, 1, 1),
        (f"Sure. {GOOD} Done.", 0, 1),
        ("<reasoning>r</reasoning> so <answer>a</answer>", 0, 0),
        ("<answer>a</answer><reasoning>r</reasoning>", 0, 0),
        ("<reasoning>r<answer>a</answer></reasoning>", 0, 0),
        ("<reasoning></reasoning><answer> </answer>", 0, 0),
        (GOOD + GOOD, 0, 0),
        ("<reasoning>r</reasoning><answer>a", 0, 0),
        ("", 0, 0),
        ("<reasoning>" * 100_000, 0, 0),
    ],
)
def test_format(text, whole, anywhere):
    assert FormatReward()([[{"role": "assistant", "content": text}]]) == [whole]
    assert FormatReward(where="anywhere")([text]) == [anywhere]


def test_format_with_other_tags():
    reward = FormatReward(tags=["think"], where="anywhere", allow_empty=True, score=0.5, wrong=-0.5)
    assert reward(["<think></think> 4", "4"]) == [0.5, -0.5]


def test_incremental_format():
    texts = ["", "<reasoning>", "<reasoning></reasoning>", GOOD, GOOD + "12345", "<answer>" * 9, GOOD + "x" * 10**6]
    scores = IncrementalFormatReward()(texts)
    assert scores == pytest.approx([0, 0.25, 0.5, 1.0, 0.995, 0.0, -1.0])


def test_repeating_a_tag_earns_nothing():
    assert IncrementalFormatReward()(["<reasoning></reasoning>" * 5]) == [0.0]


def test_xml_tags():
    reward = XmlTagsReward(tags=["a", "b"])
    assert reward(["<a>1</a> <b>2</b>", "<a>1</a>", "</a>1<a>", "<a></a>", "<a><b>1</b></a>", ""]) == [
        1,
        0.5,
        0,
        0,
        1,
        0,
    ]


def test_regex():
    assert RegexReward(pattern=r"\d+")(["a1", "a", ""]) == [1, 0, 0]
    assert RegexReward(pattern="A", flags="i", where="whole")(["a", "aa"]) == [1, 0]
    assert RegexReward(pattern="b", where="start", wrong=-1)(["ab", "ba"]) == [-1, 1]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"a": 1, "b": "x"}', 1),
        ('Here:\n```json\n{"a": 1, "b": "x"}\n```\nDone.', 1),
        ('```\n{"old": 0}\n```\n```JSON\n{"a": 1, "b": "x"}\n```', 1),
        ('{"a": 1}', 0),
        ('{"a": "1", "b": "x"}', 0),
        ('{"a": true, "b": "x"}', 0),
        ('{"a": null, "b": "x"}', 0),
        ('{"a": NaN, "b": "x"}', 0),
        ("[1, 2]", 0),
        ("{'a': 1, 'b': 'x'}", 0),
        ("", 0),
        ("[" * 200_000, 0),
        ('{"a": ' + "9" * 10_000 + ', "b": "x"}', 0),
        ("```" + " " * 100_000, 0),
    ],
)
def test_json(text, score):
    assert JsonReward(keys=["a"], types={"a": "integer", "b": "string"})([text]) == [score]


def test_json_fences_and_partial_credit():
    assert JsonReward(fenced="require")(["1", "```\n1\n```"]) == [0, 1]
    assert JsonReward(fenced="forbid")(["1", "```\n1\n```"]) == [1, 0]
    half = JsonReward(keys=["a", "b", "c"], partial=True)
    assert half(['{"a": 1}', "{}", "x", '{"a": 1, "b": 2, "c": 3}']) == [0.5, 0.25, 0, 1]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ('"s"', "string"),
        ("1.5", "number"),
        ("1", "number"),
        ("true", "boolean"),
        ("null", "null"),
        ("[]", "array"),
        ("{}", "object"),
    ],
)
def test_json_types(value, kind):
    assert JsonReward(types={"k": kind})([f'{{"k": {value}}}', '{"k": "\\u00e9"}' if kind != "string" else "{}"]) == [
        1,
        0,
    ]
