"""Lines for a terminal: broken between words, never inside a command or a metric."""

from upweight.log import counted, fitted, in_parts

COMMAND = "`upweight new mine.csv --columns prompt=Frage,completion=Antwort,label=Bewertung`"


def test_long_lines_are_broken_between_words():
    lines = fitted("no column is recognised among Frage, Antwort and Bewertung.", 30).split("\n")
    assert lines == ["no column is recognised among", "  Frage, Antwort and", "  Bewertung."]
    assert fitted("short\n  and indented", 30) == "short\n  and indented"
    assert fitted("a  table   row", 80) == "a  table   row"


def test_a_command_stays_whole_so_that_it_can_be_copied():
    shown = fitted(f"no column is recognised: say which they are: {COMMAND}, and go on", 40)
    assert COMMAND in shown
    assert "\n" not in COMMAND
    assert shown.endswith(f"\n  {COMMAND},\n  and go on")


def test_a_named_line_goes_on_below_its_text():
    assert fitted("memory   about 0.0 GiB (weights 0.0, training 0.0)", 32).split("\n") == [
        "memory   about 0.0 GiB (weights",
        "         0.0, training 0.0)",
    ]


def test_parts_stay_whole():
    parts = ["step 17/24", "loss 5.48", "grad_norm 1.021", "2460 tokens/s", "1 s left"]
    assert in_parts(parts, 40) == "step 17/24  loss 5.48  grad_norm 1.021\n  2460 tokens/s  1 s left"
    assert in_parts(parts) == "  ".join(parts)  # no terminal: one log is one line


def test_one_is_no_plural():
    assert [counted(number, "row") for number in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
