"""Rewards that compare with the answer of the row."""

import importlib.util

import pytest

from upweight.errors import UserError
from upweight.rewards.builtin import builtin_reward
from upweight.rewards.builtin.correctness import ExactReward, Number, NumericReward, last_number, same_number


def chat(text):
    return [{"role": "assistant", "content": text}]


def test_exact():
    texts = ["Paris", "<answer> paris. </answer>", "The answer is Paris!", "In Paris", "", "Lyon"]
    assert ExactReward()([chat(text) for text in texts], answer=["Paris"] * 6) == [1, 1, 1, 0, 0, 0]


def test_exact_with_a_tag_wants_the_tag():
    reward = ExactReward(tag="final", score=2.0, wrong=-1.0)
    assert reward(["Paris", "<final>Paris</final>"], answer=["Paris", "Paris"]) == [-1, 2]


def test_a_row_without_answer_does_not_count():
    assert ExactReward()(["a", "b"], answer=[None, "b"]) == [None, 1.0]
    assert NumericReward()(["1", "1"], answer=[None, "no number here"]) == [None, None]


def test_answers_need_not_be_text():
    assert NumericReward()(["7", "8"], answer=[7, 7.0]) == [1, 0]
    assert ExactReward()(["7", "true"], answer=[7, True]) == [1, 1]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("#### 72", 1),
        ("48 / 2 = 24, and 48 + 24 = 72", 1),
        (r"Therefore \boxed{72}, not 5.", 1),
        ("<reasoning>1</reasoning>\n<answer>\n72\n</answer> 9", 1),
        ("The answer is 72 clips. She sold 48 first.", 1),
        ("The answer is 3 * 24 = 72.", 1),
        ("$72.00", 1),
        ("72%", 1),
        ("<answer>none</answer> 72", 0),
        ("seventy-two", 0),
        ("1e999", 0),
        ("NaN", 0),
        ("", 0),
        ("72" * 100_000, 0),
        ("\U0001f600" * 1000 + " 72", 1),
        ("<answer>" * 50_000 + "72", 1),
    ],
)
def test_numeric_against_a_worked_answer(text, score):
    assert NumericReward()([text], answer=["48/2 = <<48/2=24>>24 clips in May.\n#### 72"]) == [score]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("Das ist 7,5.", "7,5", 1),
        ("Das ist 7,5, denn so ist es.", "7,50 €", 1),
        ("It is 7.5", "7,5", 1),
        ("Das ist 7.", "7,0", 1),
        ("Das sind 5.", "7,5", 0),
        ("1.250,50 €", "1250,50", 1),
        ("0,125", "0,125", 1),
        ("1,250 in all", "1,250", 1),
        ("1250", "1,250", 1),
        ("(3, 4)", "(3,4)", 1),
    ],
)
def test_numeric_reads_a_decimal_comma_where_the_answer_has_one(text, answer, score):
    assert NumericReward()([text], answer=[answer]) == [score]


def test_numeric_can_be_told_where_to_look():
    assert NumericReward(extract="boxed")(["72", r"\boxed{72}"], answer=["72", "72"]) == [0, 1]
    assert NumericReward(extract="last")(["<answer>1</answer> 72"], answer=["72"]) == [1]


def test_a_missing_column_is_named():
    with pytest.raises(UserError, match=r"column 'answer'.*question"):
        NumericReward()(["1"], question=["x"])


def test_math_without_its_package_says_how_to_get_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "upweight.rewards.builtin.correctness.find_spec", lambda name: None if name == "math_verify" else find(name)
    )
    with pytest.raises(UserError, match="pip install math-verify"):
        builtin_reward("math")


def test_math_compares_by_algebra():
    pytest.importorskip("math_verify")
    reward = builtin_reward("math")
    assert reward is not None
    texts = [
        r"so $\boxed{\frac{1}{2}}$",
        "The answer is 0.5",
        r"$\frac{2}{4}$",
        r"$\frac{1}{3}$",
        "",
        r"\boxed{" + "{" * 5000,
    ]
    assert reward(texts, answer=[r"\frac{1}{2}"] * 6) == [1, 1, 1, 0, 0, 0]
    assert reward(["$x^2 + 2x + 1$", "#### 7"], answer=["$(x+1)^2$", "work\n#### 7"]) == [1, 1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("It costs $1,234.50.", 1234.5),
        ("-$5", -5),
        ("$-5", -5),
        ("\u22127", -7),
        ("10-4", 4),
        ("- 5 apples", 5),
        ("x = -3", -3),
        ("3/4", 0.75),
        ("1 1/2", 1.5),
        ("2½", 2.5),
        ("½", 0.5),
        (r"\frac{3}{4}", 0.75),
        (r"-\dfrac{3}{4}", -0.75),
        (r"2\frac{1}{2}", 2.5),
        (r"\$12{,}000", 12000),
        ("1e5", 1e5),
        (".5", 0.5),
        ("1,2,3", 3),
        ("1,000,000", 1_000_000),
        ("12 apples and 7 pears.", 7),
        ("٣", 3),
        ("room42", 42),
    ],
)
def test_last_number(text, value):
    assert last_number(text) == Number(value, False)


@pytest.mark.parametrize("text", ["", "no number", "nan", "inf", "1e999", "-1e999", "9" * 5000, "1/0", "0/0"])
def test_no_finite_number(text):
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.5", "50%", True),
        ("50", "50%", True),
        ("50%", "50%", True),
        ("0.5%", "50%", False),
        ("0.333", "1/3", False),
        ("1000000", "1000001", False),
        ("12345678901", "12345678902", False),
        ("1/3", "0.3333333333333333", True),
    ],
)
def test_same_number(given, wanted, same):
    one, two = last_number(given), last_number(wanted)
    assert one is not None
    assert two is not None
    assert same_number(one, two, 1e-6, 0.0) is same


def test_tolerances():
    assert same_number(Number(1.05, False), Number(1.0, False), 0.1, 0.0)
    assert same_number(Number(105, False), Number(100, False), 0.0, 0.05)
    assert not same_number(Number(106, False), Number(100, False), 0.0, 0.05)


def test_an_enormous_text_is_read_from_its_end():
    assert last_number("1 2,345 -6/7 " * 200_000 + "8") == Number(8.0, False)
