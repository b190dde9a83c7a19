"""Reading completions, columns and marked answers."""

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin.text import column_of, in_box, marked_answer, normalised, texts_of, units_of


def test_texts_of_takes_both_shapes():
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "b"},
    ]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}]
    none = [{"role": "assistant", "content": None}]
    assert texts_of(["plain", turns, parts, none, []]) == ["plain", "b", "cd", "", ""]


def test_column_of_takes_the_plural_and_names_what_there_is():
    assert column_of({"answers": ["1"]}, "answer", "exact", 1) == ["1"]
    with pytest.raises(UserError, match="There are: other"):
        column_of({"other": ["1"], "trainer_state": object()}, "answer", "exact", 1)
    with pytest.raises(UserError, match="2 values for 1"):
        column_of({"answer": ["1", "2"]}, "answer", "exact", 1)


@pytest.mark.parametrize(
    ("text", "extract", "tag", "answer"),
    [
        ("<answer>1</answer> then <answer> 2 </answer>", "auto", None, " 2 "),
        ("<answer>a<answer>b</answer>", "auto", None, "b"),
        ("<answer>open", "auto", None, None),
        ("</answer><answer>", "auto", None, None),
        (r"so \boxed{\frac{1}{2}} ok", "auto", None, r"\frac{1}{2}"),
        ("work\n#### 42\nmore", "auto", None, "42"),
        ("The answer is: **Paris**. It is big.", "auto", None, "Paris"),
        ("<final>x</final><answer>y</answer>", "auto", "final", "x"),
        ("<answer>y</answer>", "auto", "final", None),
        ("<answer>y</answer> #### 3", "hash", None, "3"),
        ("anything", "whole", None, "anything"),
        ("", "auto", None, None),
        ("####", "auto", None, None),
    ],
)
def test_marked_answer(text, extract, tag, answer):
    assert marked_answer(text, extract, tag) == answer


def test_an_unclosed_box_is_no_answer():
    assert in_box(r"\boxed{1 + {2}") is None
    assert in_box(r"\boxed{1} \boxed{2}") == "2"
    assert in_box("\\boxed{" + "{" * 100_000) is None


def test_normalised():
    assert normalised("  **Paris \n France!** ") == normalised("paris FRANCE")
    assert normalised("\uff21\uff22\uff23") == "abc"
    assert normalised("") == ""


def test_tokens_need_ids():
    assert units_of(["a b"], {}, "words", "length") == [["a", "b"]]
    assert units_of(["ab"], {"completion_ids": [[1, 2, 3]]}, "tokens", "length") == [[1, 2, 3]]
    with pytest.raises(UserError, match="completion_ids"):
        units_of(["ab"], {}, "tokens", "length")
