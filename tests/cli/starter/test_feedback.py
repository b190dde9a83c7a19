"""Feedback in words is read by what its words stand for, or refused with what to say or write."""

import csv
import logging
import re
import runpy
from typing import Any

import pytest

from made_entries import rows_read
from upweight.cli.starter.feedback import is_label
from upweight.cli.starter.new import new
from upweight.errors import UserError

PREFERENCES = """Prompt,Response A,Response B,Preferred
Why?,So.,"Because, well.",B
Who?,Me.,You.,A
What?,This.,That.,tie
"""
LABELS = "question,answer,label\nWhy?,So.,bad\nWho?,Me.,good\nWho?,You.,bad\n"
RATINGS = "prompt,response,rating\nWhy?,So.,2\nWhy?,Because.,5\nWho?,Me.,3\n"
MODEL = "nobody/nothing"  # whose lengths are not checked


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Returns the error about a file, after the rows that the lines in it write, if there are any."""
    monkeypatch.chdir(tmp_path)

    def go(text, method=None, **options):
        (tmp_path / "mine.csv").write_text(text)
        with pytest.raises(UserError) as error:
            new(tmp_path / "mine.csv", model=MODEL, method=method, yes=True, **options)
        assert not (tmp_path / "config.yaml").exists()
        lines = re.findall(r"^    (.*)$", str(error.value), re.MULTILINE)
        (tmp_path / "recipe.py").write_text("\n".join(lines))
        runpy.run_path(str(tmp_path / "recipe.py"))
        written = re.search(r"Then: upweight new (\S+)", str(error.value))
        with (tmp_path / (written[1] if written else "mine.csv")).open(newline="") as made:
            return str(error.value), list(csv.DictReader(made))

    return go


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Returns the rows of a file as the config reads them that is written for it."""
    monkeypatch.chdir(tmp_path)

    def go(text, method=None, **options):
        (tmp_path / "mine.csv").write_text(text)
        new(tmp_path / "mine.csv", model=MODEL, method=method, yes=True, **options)
        return rows_read(tmp_path)

    return go


@pytest.mark.parametrize("method", [None, "dpo", "kto", "reward"])
@pytest.mark.parametrize("marks", [("A", "B"), ("response_a", "Response B"), ("left", "right")])
def test_a_preference_for_one_of_two_answers_becomes_pairs(written, method, marks):
    text = PREFERENCES.replace(",A\n", f",{marks[0]}\n").replace(",B\n", f",{marks[1]}\n")
    rows = written(text, method)
    better = {"prompt": "Why?", "chosen": "Because, well.", "rejected": "So."}
    if method == "kto":
        assert rows[:2] == [
            {"prompt": "Why?", "completion": "Because, well.", "label": True},
            {"prompt": "Why?", "completion": "So.", "label": False},
        ]
    else:
        assert rows == [better, {"prompt": "Who?", "chosen": "Me.", "rejected": "You."}]


def test_a_preference_that_is_always_the_same(written):
    rows = written("prompt;answer 1;answer 2;winner\nWhy?;So.;Well.;2\n")
    assert rows == [{"prompt": "Why?", "chosen": "Well.", "rejected": "So."}]


@pytest.mark.parametrize("method", [None, "kto"])
@pytest.mark.parametrize("marks", [("good", "bad"), ("yes", "no"), ("1.0", "0.0")])
def test_labels_in_words_become_true_and_false(written, method, marks):
    rows = written(LABELS.replace("good", marks[0]).replace("bad", marks[1]), method)
    assert [row["label"] for row in rows] == [False, True, False]


@pytest.mark.parametrize("method", [None, "kto"])
@pytest.mark.parametrize("marks", [("up", "", "down"), ("up", "neutral", "down")])
def test_rows_without_a_mark_are_not_made_bad_ones(written, caplog, method, marks):
    caplog.set_level(logging.INFO)
    text = "id,Customer message,Agent reply,Thumbs\n" + "".join(f"1,Why?,So.,{mark}\n" for mark in marks * 2)
    assert [row["label"] for row in written(text, method)] == [True, False] * 2
    assert f"'down' is false; rows with {repr(marks[1]) if marks[1] else 'nothing'} are left out" in caplog.text


@pytest.mark.parametrize("label", ["yes", "no"])
def test_labels_of_one_kind_are_said(written, caplog, label):
    caplog.set_level(logging.INFO)
    assert len(written(f"prompt,completion,label\nWhy?,So.,{label}\n")) == 1
    assert f"all of these rows are {'good' if label == 'yes' else 'bad'} ones, and kto needs both" in caplog.text


def test_pairs_are_not_made_with_rows_without_a_mark(refused):
    _, rows = refused("prompt,answer,label\nWhy?,So.,good\nWhy?,No.,\nWho?,Me.,good\nWho?,You.,bad\n", "dpo")
    assert [row["rejected"] for row in rows] == ["You."]


@pytest.mark.parametrize("method", [None, "kto"])
def test_labels_beside_a_prompt_that_is_not_recognised(refused, written, method):
    text = "id,words,reply,thumbs\n1,Why so?,So.,up\n2,Who?,Me.,down\n3,What?,No.,down\n"
    problem, _ = refused(text, method)
    assert "--columns prompt=words,completion=reply,label=thumbs`" in problem
    assert "--method sft" not in problem
    rows = written(text, method, columns="prompt=words,completion=reply,label=thumbs")
    assert [row["label"] for row in rows] == [True, False, False]


def test_the_role_without_a_column_is_named(refused):
    problem, _ = refused("id,words,Agent reply,thumbs\n1,Why so?,So.,true\n")
    assert "completion is 'Agent reply', label is 'thumbs', no prompt is recognised among id, words" in problem
    assert "--columns 'prompt=words,completion=Agent reply,label=thumbs'`" in problem


@pytest.mark.parametrize("labels", [("1", "2"), ("one", "two")])
def test_rows_with_labels_that_cannot_be_read_are_not_proposed_for_sft(refused, labels):
    problem, _ = refused("prompt,completion,label\n" + "".join(f"Why?,So.,{label}\n" for label in labels))
    assert "`--method sft` trains on all rows, whatever 'label' holds" in problem


def test_labels_are_read_as_training_reads_them():
    assert all(is_label(value) for value in ("True", " 0", 1.0, False))
    assert not any(is_label(value) for value in ("1.0", "yes", None, 2))


def test_ratings_are_no_labels(refused):
    problem, _ = refused(RATINGS, "kto")
    assert "kto needs true or false in 'rating', and row 0 has '2'" in problem
    assert "say which are good and which bad" in problem
    assert (
        "--columns prompt=prompt,completion=response,label=rating --values 2=false,3=false,5=true --method kto`"
        in problem
    )
    assert problem.rstrip().endswith("--method kto`")  # a full stop would stand alone below the command


def test_ratings_that_are_no_label_by_name_are_proposed_as_one(refused):
    problem, _ = refused(RATINGS.replace("rating", "stars"), "kto")
    assert "'stars' holds ratings; say which are good and which bad" in problem
    assert "label=stars --values 2=false,3=false,5=true --method kto`" in problem


@pytest.mark.parametrize("name", ["Sterne", "Kundenzufriedenheit", "Étoiles", "Puntuación"])
def test_ratings_are_recognised_by_foreign_words(name, refused):
    problem, _ = refused(RATINGS.replace("rating", name), "kto")
    assert f"true or false in {name!r}" in problem
    assert "It holds ratings; say which are good and which bad" in problem


def test_low_school_marks_and_ranks_are_good(refused, written, caplog):
    marks = RATINGS.replace("rating", "Schulnote")
    problem, _ = refused(marks, "kto")
    assert "label=Schulnote --values 2=true,3=true,5=false --method kto`" in problem
    caplog.set_level(logging.INFO)
    written(marks, "sft")
    assert "def good(row): return float(row['Schulnote'] or 'inf') <= 3" in caplog.text


def test_numbers_that_stand_for_something_are_asked_for_in_their_order(refused):
    problem, _ = refused(
        RATINGS.replace("rating", "mark"), "kto", columns="prompt=prompt,completion=response,label=mark"
    )
    assert "--values '2=?,3=?,5=?'" in problem


@pytest.mark.parametrize("method", [None, "kto"])
def test_ratings_become_labels_by_what_their_user_says(written, method):
    named = "prompt=prompt,completion=response,label=rating"
    assert written(RATINGS, method, columns=named, values="2=false,5=true") == [
        {"prompt": "Why?", "completion": "So.", "label": False},
        {"prompt": "Why?", "completion": "Because.", "label": True},
    ]


def test_ratings_from_a_number_on_are_good(written, refused, tmp_path):
    named = "prompt=prompt,completion=response,label=rating"
    assert [row["label"] for row in written(RATINGS, "kto", columns=named, values="3")] == [False, True, True]
    (tmp_path / "config.yaml").unlink()
    assert "--values 3: 'label' holds no ratings, but 'bad', 'good'." in refused(LABELS, "kto", values="3")[0]
    many = "prompt,response,rating\n" + "".join(f"Who {n}?,Me.,{n * 5}\n" for n in range(20))
    assert "label=rating --values 47.5 --method kto`" in refused(many, "kto")[0]


def test_pairs_are_read_by_kto_whatever_their_prompt_is_called(written):
    rows = written("question,chosen,rejected\nWhy?,Because.,No.\nWho?,Me.,You.\n", "kto")
    assert [(row["prompt"], row["completion"], row["label"]) for row in rows][:2] == [
        ("Why?", "Because.", True),
        ("Why?", "No.", False),
    ]


def test_ratings_beside_right_answers_are_told_of(written, caplog):
    caplog.set_level(logging.INFO)
    written(RATINGS, "grpo")
    assert "'rating' holds ratings, and the reward takes every 'response' for a right one" in caplog.text


@pytest.mark.parametrize("name", ["rating", "stars"])
def test_a_terminal_is_asked_which_ratings_are_good(name, tmp_path, monkeypatch):
    (tmp_path / "mine.csv").write_text(RATINGS.replace("rating", name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("upweight.cli.starter.new._is_terminal", lambda: True)
    answers, questions = iter(["high", "", MODEL]), []
    monkeypatch.setattr("builtins.input", lambda question: (questions.append(question), next(answers))[1])
    new(tmp_path / "mine.csv", method="kto")
    proposed = f"Which ratings in {name!r} are good (true) and which bad? Or the lowest good one alone "
    assert questions[:2] == [f"{proposed}[2=false,3=false,5=true]\n> "] * 2
    assert [row["label"] for row in rows_read(tmp_path)] == [False, True, False]


@pytest.mark.parametrize(("text", "method"), [(RATINGS, "dpo"), (LABELS, "simpo")])
def test_rows_with_one_answer_are_paired(refused, text, method):
    problem, rows = refused(text, method)
    assert "pairs need a better and a worse one of the same prompt" in problem
    assert "Rename columns" not in problem
    pair = {"chosen": "Because.", "rejected": "So."} if text == RATINGS else {"chosen": "Me.", "rejected": "You."}
    assert [{name: row[name] for name in pair} for row in rows] == [pair]


def test_rows_that_cannot_be_paired(refused):
    assert "write both into a row, as prompt, chosen and rejected" in refused("prompt,answer\nWhy?,So.\n", "dpo")[0]


RATED = "prompt,response,rating\nWhy?,So.,5\nHow?,Thus.,1\nWhen?,,5\nWhere?,Here.,4\n"
MARKED = "prompt,response,label\nWhy?,So.,good\nHow?,Thus.,bad\nWhen?,,good\nWhere?,Here.,good\n"


@pytest.mark.parametrize("text", [RATED, MARKED], ids=["rated", "marked"])
def test_good_rows_are_kept_by_the_filter_that_is_written_for_empty_cells(written, tmp_path, caplog, text):
    caplog.set_level(logging.INFO)
    assert len(written(text, "sft")) == 3
    assert "mine.good" not in caplog.text
    line = re.search(r"write `(if not .*: return False)` before the `return` of `keep` in filters.py", caplog.text)
    assert line is not None
    file = tmp_path / "filters.py"
    file.write_text(file.read_text().replace("    return all(", f"    {line[1]}\n    return all("))
    keep = runpy.run_path(str(file))["keep"]
    with (tmp_path / "mine.csv").open(newline="") as rows:
        assert [row["prompt"] for row in csv.DictReader(rows) if keep(row)] == ["Why?", "Where?"]


@pytest.mark.parametrize(
    ("text", "options", "note"),
    [
        ("prompt,chosen,rejected,score_chosen\nWhy?,So.,No.,5\n", {}, "not read by dpo: score_chosen"),
        (LABELS, {"method": "sft"}, "whatever 'label' holds: 'good', 'bad'. To train on some of them only: `filter:"),
        ("question;better;worse\nWhy?;So.;No.\n", {}, "chosen is 'better', rejected is 'worse'"),
        (
            "id;question;preferred_answer;other_answer;rater\n1;Why?;So.;No.;r\n",
            {},
            "prompt is 'question', chosen is 'preferred_answer', rejected is 'other_answer'",
        ),
    ],
)
def test_what_is_noted(tmp_path, caplog, text, options, note):
    caplog.set_level(logging.INFO)
    (tmp_path / "mine.csv").write_text(text)
    new(tmp_path / "mine.csv", model=MODEL, output=tmp_path / "config.yaml", yes=True, **options)
    assert note in caplog.text
    assert "holds ratings" not in caplog.text


@pytest.mark.parametrize("marks", [["1", "2", "4", "5.0", "N/A", ""], ["0.1", "0.2", "0.8", "0.9"]])
def test_the_filter_that_is_proposed_keeps_the_upper_half_of_ratings(tmp_path, caplog, marks):
    caplog.set_level(logging.INFO)
    lines = "".join(f"Why {n}?,So {n}.,{marks[n % len(marks)]}\n" for n in range(12))
    (tmp_path / "mine.csv").write_text("question,reply,csat score\n" + lines)
    new(tmp_path / "mine.csv", model=MODEL, output=tmp_path / "config.yaml", yes=True)
    code: dict[str, Any] = {}
    exec(re.search(r"`(def good.*?)` in mine.py", caplog.text)[1], code)
    assert [mark for mark in marks if code["good"]({"csat score": mark})] == marks[2:4]


def test_whether_an_answer_helped_is_a_label(written):
    lines = "".join(f"Why {n}?,So {n}.,{('Yes', 'No', 'yes', '')[n % 4]}\n" for n in range(8))
    rows = written("Question,Response,Was this helpful?\n" + lines)
    assert [row["label"] for row in rows] == [True, False, True] * 2


def test_dates_are_no_texts(refused):
    text = "Am;Kunde;Erwiderung\n" + "".join(f"03.11.2026 14:0{n};Wer ist {n}?;Es ist {n}.\n" for n in range(3))
    assert "--columns prompt=Kunde,completion=Erwiderung`" in refused(text)[0]


def test_marks_in_several_spellings_are_all_read(written):
    marks = ["thumbs up", "👍", "up", "thumbs down", "👎", "down", ""]
    text = "question,answer,feedback\n" + "".join(f"Why {n}?,So {n}.,{marks[n % 7]}\n" for n in range(14))
    good = [row["label"] for row in written(text)]
    assert (good.count(True), good.count(False)) == (6, 6)


def test_words_that_are_not_known_are_asked_for_where_a_method_is_named(refused):
    marks = ["up", "nice", "fine", "meh", "ugly", "dull"]
    text = "question,answer,feedback\n" + "".join(f"Why {n}?,So {n}.,{marks[n % 6]}\n" for n in range(12))
    message, _ = refused(text, "kto")
    assert "row 0 has 'up'" in message
    assert "--values 'up=?,nice=?,fine=?,meh=?,ugly=?,dull=?'" in message


def test_answers_of_any_name_are_compared_where_marks_have_an_order(written):
    head = "question,model_x,model_y,preferred\n"
    rows = written(head + "Why not?,So it is.,No idea.,first\nWho is it?,Me I say.,You I say.,second\n")
    assert [row["chosen"] for row in rows] == ["So it is.", "You I say."]


def test_answers_that_some_marks_name_are_asked_for(refused):
    text = "question,left,right,winner\nWhy not?,So it is.,No idea.,left\nWho is it?,Me I say.,You I say.,bothbad\n"
    text += "When is it?,Now I say.,Then I say.,right\n"
    message, _ = refused(text)
    assert "answer_a=left,answer_b=right,winner=winner --values 'left=?,bothbad=?,right=?'" in message


def test_a_choice_beside_texts_that_it_does_not_compare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "".join(f"What is {n}?,Some text.,More of it.,{'ABCD'[n % 4]}\n" for n in range(8))
    (tmp_path / "mine.csv").write_text("question,passage,hint,choice\n" + lines)
    new(tmp_path / "mine.csv", model=MODEL, yes=True)
    assert "rl: grpo" in (tmp_path / "config.yaml").read_text()


def test_prompts_beside_texts_of_an_unknown_kind_are_asked_about(written, capsys):
    written("Question,Wir\n" + "".join(f"Wer ist {n}?,Es ist {n}.\n" for n in range(3)))
    printed = capsys.readouterr().out
    assert "if 'Wir' holds answers to imitate: `upweight new " in printed
    assert "--columns prompt=Question,completion=Wir`" in printed


def test_two_answers_with_a_rating_each_become_pairs(refused):
    names = "Frage,Antwort 1,Antwort 2,Punkte 1,Punkte 2"
    rows = f'{names}\nWhy?,So.,No.,"4,5",3\nWho?,Me.,You.,2,4\nWhat?,A.,B.,3,3\nHow?,C.,D.,,1\n'
    for method in (None, "dpo"):
        problem, made = refused(rows, method)
        assert "'Punkte 1' and 'Punkte 2' rate 'Antwort 1' and 'Antwort 2'" in problem
        assert made == [
            {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
            {"prompt": "Who?", "chosen": "You.", "rejected": "Me."},
        ]


def test_ratings_with_decimal_commas_are_ratings(written, caplog):
    rows = "question;answer;score\nWhy?;So.;4,5\nWho?;Me.;1,5\nWhen?;Now.;\nWhat?;That.;5\n"
    caplog.set_level(logging.INFO)
    columns = "prompt=question,completion=answer,label=score"
    assert [row["label"] for row in written(rows, "kto", columns=columns, values="4.5")] == [True, False, True]
