"""Numbers as people write them."""

import pytest

from upweight.rewards.builtin.numbers import Number, last_number, same_number


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
