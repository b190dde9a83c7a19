"""Files whose columns have names of their own are read as their user says, and no line that is printed guesses."""

import csv
import re
import runpy
import shlex
from pathlib import Path

import pytest

from made_entries import read_config, rows_read
from made_runs import write_model
from upweight.cli.starter.new import new
from upweight.errors import UserError

WINNERS = """ticket_id;ticket_text;reply_a;reply_b;winner
T-1;How do I pay?;By card.;No idea.;a
T-2;Where is it?;No idea.;At the door.;b
T-3;Who are you?;Me, myself.;You, yourself.;tie
T-4;What is it?;It is this.;;a
"""
PAIRS = [
    {"prompt": "How do I pay?", "chosen": "By card.", "rejected": "No idea."},
    {"prompt": "Where is it?", "chosen": "At the door.", "rejected": "No idea."},
]
COMPARED = WINNERS.replace("ticket_id;ticket_text;reply_a;reply_b;winner", "Nr;Frage;Antwort 1;Antwort 2;Besser")
LABELS = """Kunde;Wir;Urteil
How do I pay?;By card.;fein
Where is it?;No idea.;mies
Who are you?;I am me.;neutral
What is it?;It is this.;
How much is it?;Ten a day.;fein
"""
RATINGS = "Question;Answer;Rating\nHow so?;Like so.;1\nWhy so?;Because so.;\nHow so?;Not so.;5\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("columns") / "model"))


@pytest.fixture
def go(tmp_path, monkeypatch, model):
    """Returns the error about a file, or None; the config is beside it."""
    monkeypatch.chdir(tmp_path)

    def run(file, text=None, **options):
        if text is not None:
            (tmp_path / file).write_text(text, encoding=options.pop("encoding", "utf-8"))
        (tmp_path / "config.yaml").unlink(missing_ok=True)
        try:
            new(tmp_path / file, model=model, yes=True, **options)
        except UserError as error:
            assert not (tmp_path / "config.yaml").exists()
            return str(error)
        return None

    return run


def made_by(problem, go, folder):
    """Runs the lines of Python in a message, then `new` on what they write; returns the rows."""
    lines = re.findall(r"^    (.*)$", problem, re.MULTILINE)
    (folder / "recipe.py").write_text("\n".join(lines))
    runpy.run_path(str(folder / "recipe.py"))
    written = re.search(r"Then: upweight new (\S+)", problem)[1]
    assert go(written) is None
    with (folder / written).open(newline="") as opened:
        return list(csv.DictReader(opened))


def asked(problem, option):
    """Returns what a message proposes for an option."""
    words = shlex.split(re.search(r"`(upweight new [^`]*)`", problem)[1])
    return words[words.index(option) + 1]


@pytest.mark.parametrize("names", ["ticket_text", "ticket"])
@pytest.mark.parametrize("marks", [("a", "b"), ("reply_a", "reply_b"), ("A", "reply_b"), ("left", "right")])
def test_the_winner_names_the_answers_and_the_text_that_is_left_is_the_prompt(go, tmp_path, capsys, names, marks):
    text = WINNERS.replace("ticket_text", names).replace(";a\n", f";{marks[0]}\n").replace(";b\n", f";{marks[1]}\n")
    assert go("mine.csv", text) is None
    assert "'winner' says which of 'reply_a' and 'reply_b' is better: dpo" in capsys.readouterr().out
    assert rows_read(tmp_path) == PAIRS
    assert read_config(tmp_path)["rl"] == "dpo"


@pytest.mark.parametrize(
    "text",
    [
        WINNERS.replace("T-1", "a note").replace("ticket_id", "comment"),  # two texts may be the prompt
        WINNERS.replace("ticket_id", "reply_c").replace("T-4;", "T-4 is it;"),  # three answers
    ],
)
def test_columns_that_are_not_sure_are_asked_for(go, tmp_path, text):
    problem = go("mine.csv", text)
    assert "answer_a=" in asked(problem, "--columns")
    assert go("mine.csv", text, columns="prompt=ticket_text,answer_a=reply_a,answer_b=reply_b,winner=winner") is None
    assert rows_read(tmp_path) == PAIRS


def test_marks_of_a_winner_that_say_nothing_are_asked_for(go, tmp_path):
    text = WINNERS.replace(";a\n", ";gpt\n").replace(";b\n", ";llama\n")
    problem = go("mine.csv", text)
    assert asked(problem, "--values") == "gpt=?,llama=?,tie=?"
    named = asked(problem, "--columns")
    assert go("mine.csv", text, columns=named, values="gpt=answer_a,llama=answer_b") is None
    assert rows_read(tmp_path) == PAIRS


def test_answers_with_names_in_another_language_become_pairs(go, tmp_path):
    text = COMPARED.replace(";a\n", ";1\n").replace(";b\n", ";2\n")
    assert go("mine.csv", text) is None
    assert rows_read(tmp_path) == PAIRS
    unknown = text.replace("Frage;Antwort 1;Antwort 2;Besser", "Kunde;Wir 1;Wir 2;Lieber")
    named = asked(go("mine.csv", unknown), "--columns")
    assert named == "prompt=Kunde,answer_a=Wir 1,answer_b=Wir 2,winner=Lieber"
    assert go("mine.csv", unknown, columns=named) is None
    assert rows_read(tmp_path) == PAIRS


@pytest.mark.parametrize("name", ["Gewinner", "Besser", "Urteil"])
def test_a_winner_in_another_language_is_read_with_its_words_for_neither(go, tmp_path, name):
    text = COMPARED.replace("Antwort 1;Antwort 2;Besser", f"Antwort A;Antwort B;{name}").replace(";tie", ";beide")
    assert go("mine.csv", text) is None
    assert rows_read(tmp_path) == PAIRS


def test_words_of_a_winner_that_are_not_known_are_asked_for(go, tmp_path):
    text = COMPARED.replace("Antwort 1;Antwort 2;Besser", "Antwort A;Antwort B;Urteil").replace(";tie", ";Chef fragen")
    problem = go("mine.csv", text)
    assert asked(problem, "--values") == "a=?,b=?,Chef fragen=?"
    assert go("mine.csv", columns=asked(problem, "--columns"), values="a=answer_a,b=answer_b") is None
    assert rows_read(tmp_path) == PAIRS


def test_ratings_beside_numbered_answers_are_no_winner(go, tmp_path):
    lines = "".join(f"What is {n} so?;It is {n}.;It was {n}.;{n}\n" for n in (1, 2, 3, 4))
    assert go("mine.csv", "Frage;Antwort 1;Antwort 2;Urteil\n" + lines) is None
    assert "rl" not in read_config(tmp_path)


def test_a_column_of_numbers_that_no_reward_reads_is_named(go, tmp_path, caplog):
    caplog.set_level("INFO")
    sums = "id,question,result\n1,What do two cost?,8 €\n2,What do three cost?,12\n3,What do two more cost?,8\n"
    assert go("sums.csv", sums) is None
    named = asked(caplog.text.partition("'result' holds numbers")[2], "--columns")
    assert named == "prompt=question,answer=result"
    assert go("sums.csv", method="grpo", columns=named) is None
    assert read_config(tmp_path)["trl"]["reward_funcs"] == ["numeric(column='result')"]


def test_values_with_commas_are_named_with_semicolons(go, tmp_path):
    rows = [(f"Wie {n}?", f"So {n}.", ("2,5", "4,5", "3,5")[n % 3]) for n in range(12)]
    text = "Kunde;Wir;Urteil\n" + "".join(";".join(row) + "\n" for row in rows)
    named = "prompt=Kunde,completion=Wir,label=Urteil"
    problem = go("mine.csv", text, method="kto", columns=named)
    assert asked(problem, "--values") == "2,5=?;3,5=?;4,5=?"
    assert go("mine.csv", text, method="kto", columns=named, values="2,5=false;4,5=true") is None
    assert [row["label"] for row in rows_read(tmp_path)] == [False, True] * 4


@pytest.mark.parametrize("method", [None, "kto"])
def test_labels_with_names_in_another_language_become_true_and_false(go, tmp_path, method, caplog):
    caplog.set_level("INFO")
    named = asked(go("mine.csv", LABELS, method=method), "--columns")
    assert named == "prompt=Kunde,completion=Wir,label=Urteil"
    problem = go("mine.csv", LABELS, method=method, columns=named)
    assert asked(problem, "--values") == "fein=?,mies=?,neutral=?"
    assert go("mine.csv", LABELS, method=method, columns=named, values="fein=true,mies=false") is None
    said = "in 'Urteil', 'fein' is true, 'mies' is false; rows with 'neutral', nothing are left out"
    assert said in caplog.text
    rows = rows_read(tmp_path)
    assert [row["label"] for row in rows] == [True, False, True]
    assert rows[0] == {"prompt": "How do I pay?", "completion": "By card.", "label": True}
    assert read_config(tmp_path)["rl"] == "kto"


def test_named_columns_are_mapped_in_the_config(go, tmp_path):
    assert go("mine.csv", LABELS, columns="prompt=Kunde,completion=Wir") is None
    (entry,) = read_config(tmp_path)["datasets"]
    assert entry["type"] == {"field_instruction": "Kunde", "field_output": "Wir"}
    assert go("mine.csv", LABELS.replace("fein", "true").replace("mies", "false").replace("neutral", "true").replace(
        "this.;\n", "this.;false\n"), columns="prompt=Kunde,completion=Wir,label=Urteil") is None  # fmt: skip
    assert read_config(tmp_path)["rl"] == "kto"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"columns": "promt=Kunde"}, "--columns promt=...: no role. Roles are prompt, completion"),
        ({"columns": "prompt=Kunden"}, "--columns prompt=Kunden: no such column. There are Kunde, Wir, Urteil"),
        ({"columns": "prompt=Kunde,completion=Kunde"}, "a column has two roles"),
        ({"columns": "prompt=Kunde,completion=Wir,answer=Urteil"}, "a column for 'completion' twice"),
        ({"columns": "Kunde"}, "expected NAME=NAME"),
        (
            {"columns": "prompt=Kunde,completion=Wir,label=Urteil", "method": "sft"},
            "sft reads completion, prompt",
        ),
        ({"columns": "prompt=Kunde,completion=Wir", "values": "fein=true"}, "--values: sft reads"),
        ({"columns": "prompt=Kunde,completion=Wir,label=Urteil", "values": "fein=yes"}, "expected true or false"),
        (
            {"columns": "prompt=Kunde,completion=Wir,label=Urteil", "values": "ok=true"},
            "'Urteil' holds 'fein'",
        ),
    ],
)
def test_what_columns_and_values_cannot_be(go, options, problem):
    assert problem in go("mine.csv", LABELS, **options)


def test_ratings_may_have_gaps(go, tmp_path, caplog):
    caplog.set_level("INFO")
    assert go("mine.csv", RATINGS) is None
    line = re.search(r"`(def good[^`]*)`", caplog.text)[1]
    mine = {}
    exec(line, mine)
    assert [mine["good"]({"Rating": value}) for value in ("5", "1", "", None)] == [True, False, False, False]
    rows = made_by(go("mine.csv", RATINGS, method="dpo"), go, tmp_path)
    assert rows == [{"prompt": "How so?", "chosen": "Not so.", "rejected": "Like so."}]


def test_files_of_excel_are_answered_with_the_way_out(go, tmp_path):
    umlauts = LABELS.replace("By card", "Schön")
    assert "iconv -f cp1252 -t utf-8" in go("mine.csv", umlauts, encoding="cp1252")
    assert "iconv -f utf-16 -t utf-8" in go("mine.csv", umlauts, encoding="utf-16")
    assert "`tail -n +2" in go("mine.csv", f"sep=;\n{umlauts}")
    assert "is a workbook" in go("mine.xlsx", "PK")


def test_answers_that_are_numbers_are_asked_for_and_named(go, tmp_path, caplog):
    caplog.set_level("INFO")
    sums = "id,Was,Wert\n1,Was ist drei und vier?,7\n2,Was ist drei und fuenf?,8\n"
    assert "`answer=NAME` after it" in (go("sums.csv", sums, method="grpo") or "")
    assert go("sums.csv", method="grpo", columns="prompt=Was,answer=Wert") is None
    assert read_config(tmp_path)["trl"]["reward_funcs"] == ["numeric(column='Wert')"]
    assert "reward numeric compares with 'Wert'" in caplog.text


def in_rows(head):
    return f"{head}\nHow do I pay?;By card.;paid\nWhere is it?;At the door.;room\nWho are you?;I am me.;seen by A\n"


@pytest.mark.parametrize(
    ("head", "prompt", "answer"),
    [
        ("Frage;Antwort;Kategorie", "Frage", "Antwort"),
        ("Kundenanfrage;Erwartet;Notiz", "Kundenanfrage", "Erwartet"),
        ("Question posée;Réponse;Catégorie", "Question posée", "Réponse"),
        ("pregunta;respuesta;categoría", "pregunta", "respuesta"),
        ("问题;回答;类别", "问题", "回答"),
    ],
)
def test_names_in_other_languages_are_recognised(head, prompt, answer, go, caplog):
    caplog.set_level("INFO")
    assert go("rows.csv", in_rows(head)) is None
    form = read_config(Path())["datasets"][0]["type"]
    assert (form["field_instruction"], form["field_output"]) == (prompt, answer)
    assert f"--columns {shlex.quote(f'prompt={prompt},completion={answer}')}" in caplog.text  # how to choose others


def test_columns_that_are_not_recognised_are_asked_for(go, tmp_path, monkeypatch, model):
    text = "Notiz;Kunde;Wir;Thema\nby A;How do I pay?;By card.;pay\nby A;Where is it?;At the door.;way\n"
    text += "by A;Who are you?;I am me.;who\n"
    assert "--columns prompt=Kunde,completion=Wir`" in go("rows.csv", text)  # what is in all rows alike is no text
    (tmp_path / "rows.csv").write_text(text)
    answers, questions = iter(["prompt=Kunde,completion=Nichts", "", "", ""]), []
    monkeypatch.setattr("upweight.cli.starter.new._is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: (questions.append(question), next(answers))[1])
    new(tmp_path / "rows.csv", model=model)
    assert questions[:2] == ["Which columns hold what? [prompt=Kunde,completion=Wir]\n> "] * 2
    assert read_config(tmp_path)["datasets"][0]["type"]["field_output"] == "Wir"
