"""Which columns of a user's rows hold what, by their names; and the first row of a file. Imports nothing heavy."""

import csv
import gzip
import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, TextIO
from unicodedata import combining, normalize

# Columns that a `type` mapping can name, by the kind of data.
ROLES = {
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "text": ("instruction", "output"),
    "prompts": ("prompt",),
}
ASKED = ("prompt", "question", "instruction", "query", "input", "problem", "task", "user", "context", "request",
         "message", "inquiry")  # fmt: skip
ANSWERERS = {"agent", "assistant", "bot", "model", "system"}  # whose messages are no prompts
ANSWERED = (
    "completion",
    "output",
    "answer",
    "response",
    "reply",
    "solution",
    "target",
    "expected",
    "assistant",
    "text",
)
NAMES = {  # words in the names of columns, the likeliest first
    "prompt": ASKED,
    "instruction": ("instruction", *ASKED),
    "chosen": (
        "chosen",
        "better",
        "good",
        "preferred",
        "accepted",
        "winner",
        "winning",
        "best",
        "positive",
        "liked",
        "pos",
    ),
    "rejected": ("rejected", "worse", "bad", "dispreferred", "declined", "loser", "losing", "worst", "negative", "neg"),
    "completion": ANSWERED,
    "output": ("output", *ANSWERED),
    "label": (
        "label",
        "desirable",
        "thumbs",
        "thumb",
        "liked",
        "upvoted",
        "good",
        "correct",
        "rating",
        "feedback",
        "helpful",
        "csat",
    ),
}
# What these words are in German, French, Spanish, Portuguese, Italian and Chinese, without accents.
FOREIGN = {
    "question": "frage pregunta pergunta domanda 问题 提问",
    "request": "anfrage demande solicitud consulta richiesta 请求",
    "instruction": "anweisung consigne instruccion instrucao istruzione 指令",
    "task": "aufgabe tache tarea tarefa compito 任务",
    "input": "eingabe entree entrada 输入",
    "answer": "antwort reponse respuesta resposta risposta 回答 答案 回复",
    "output": "ausgabe sortie salida saida 输出",
    "solution": "losung loesung solucion solucao soluzione 解答",
    "expected": "erwartet attendu attendue esperado esperada atteso attesa 期望 ergebnis resultado risultato 结果",
    "better": "besser bessere meilleur meilleure mejor melhor migliore 更好",
    "worse": "schlechter schlechtere pire peor pior peggiore 更差",
    "preferred": "bevorzugt bevorzugte prefere preferee preferido preferida preferito preferita 偏好",
    "good": "gut gute bon bonne bueno buena bom boa buono buona 好",
    "bad": "schlecht schlechte mauvais mauvaise malo mala mau ruim cattivo cattiva 差",
    "winner": "gewinner sieger gagnant gagnante ganador ganadora vencedor vencedora vincitore vincitrice 胜者",
    "chosen": "gewahlt gewaehlt gewahlte choisi choisie elegido elegida escolhido escolhida scelto scelta 选中",
    "rejected": "abgelehnt abgelehnte rejete rejetee rechazado rechazada rejeitado rejeitada rifiutato rifiutata 拒绝",
    "rating": "bewertung sterne punkte punktzahl zufriedenheit etoiles calificacion puntuacion estrellas "
    "satisfaccion avaliacao pontuacao estrelas satisfacao valutazione punteggio soddisfazione 评分 评级 星级",
    "helpful": "hilfreich utile util 有用",
    "correct": "richtig korrekt correcto correto corretto 正确",
}
WHOLE = ("good", "bad")  # their words end others too: Geschlecht, abonné
COMPOUND = 5  # letters of a word that may end a longer one, as `frage` ends `Kundenfrage`
OTHER = {"other", "alternative", "second"}  # the rejected one of two columns whose names are the same but for a word
# What rows without a `type` need, by the kind of data: all of one of these.
PLAIN = {
    "pairs": (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
    "labelled": (("completion", "label"), ("chosen", "rejected")),
    "text": (
        ("messages",),
        ("conversations",),
        ("prompt", "completion"),
        ("instruction", "output"),
        ("text",),
        ("input_ids",),
    ),
    "prompts": (("prompt",),),
}
LONGEST_LINE = 1 << 22  # characters that are read of a file to find its first row
csv.field_size_limit((1 << 31) - 1)  # characters of a cell: the module's 131,072 are fewer than long documents have


def guess_columns(kind: str, columns: Iterable[str]) -> dict[str, str]:
    """Return the column for each role of a kind of data; a role without a likely column is left out."""
    left = list(columns)
    column_of: dict[str, str] = {}
    for role in ROLES.get(kind, ()):
        column = next((name for word in (role, *NAMES[role]) for name in left if _is_named(name, word)), None)
        column = column or next(iter(get_close_matches(role, left, 1, 0.75)), None)
        if column is None and role == "rejected" and "chosen" in column_of:
            column = _other_than(column_of["chosen"], left)
        if column is not None:
            column_of[role] = column
            left.remove(column)
    return column_of


def are_swapped(chosen: str, rejected: str) -> bool:
    """Return whether two columns of pairs are named for each other's role."""
    return guess_columns("pairs", (chosen, rejected)) == {"chosen": rejected, "rejected": chosen}


def _is_named(name: str, word: str) -> bool:
    words = words_of(name)
    return word in words and not (word == "message" and ANSWERERS & set(words))


def _other_than(chosen: str, columns: Iterable[str]) -> str | None:
    """Return the column beside a chosen one that is named alike: `other_answer` beside `preferred_answer`."""
    rest = set(words_of(chosen)[1:]) - set(NAMES["chosen"])
    words = {name: set(words_of(name)[1:]) for name in columns}
    return next((name for name in words if words[name] & OTHER and words[name] - OTHER == rest), None)


def words_of(name: str) -> list[str]:
    """Return the words in the name of a column, in English too: `userQuestion_1` holds user and question."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    letters = "".join(letter for letter in normalize("NFKD", spaced.lower()) if not combining(letter))
    words = re.findall(r"[^\W\d_]+", letters)
    return [name.lower(), *words, *(english for english in FOREIGN if _has_one(words, english))]


def _has_one(words: Iterable[str], english: str) -> bool:
    """Return whether words are foreign ones for this, or end in one; Chinese has no spaces between words."""
    shortest = 99 if english in WHOLE else COMPOUND
    return any(
        word == one or (len(one) >= shortest and word.endswith(one)) or (not one.isascii() and one in word)
        for word in words
        for one in FOREIGN[english].split()
    )


def type_mapping(kind: str, columns: Iterable[str]) -> str | None:
    """Return the `type` that reads columns of other names, to paste; None where some are not recognised."""
    column_of = guess_columns(kind, columns)
    if not column_of or len(column_of) < len(ROLES[kind]):
        return None
    return f"type: {{{', '.join(f'field_{role}: {_quoted(name)}' for role, name in column_of.items())}}}"


def mapping_advice(kind: str, row: Mapping[str, Any]) -> str | None:
    """Return the keys that read a row with columns of other names, to paste; None where some are not recognised."""
    mapping = type_mapping(kind, row)
    if mapping is None:
        return None
    if not any(isinstance(row[name], list) for name in guess_columns(kind, row).values()):
        return f"`{mapping}`"
    scored = "" if kind != "text" or misses_columns("prompts", row) else "; to score answers by rewards: `rl: grpo`"
    return f"`{mapping}` and, since there are messages in it, `as_messages: true`{scored}"


def _quoted(name: str) -> str:
    """Return a name as YAML takes it inside braces."""
    return name if re.fullmatch(r"[A-Za-z_][\w .-]*", name) else json.dumps(name, ensure_ascii=False)


def misses_columns(kind: str, columns: Iterable[str]) -> bool:
    """Return whether rows with these columns cannot be read without a `type`."""
    there = set(columns)
    return kind in PLAIN and not any(there.issuperset(needed) for needed in PLAIN[kind])


def csv_separator(file: Path, line: str) -> str:
    """Return what separates the cells of a CSV, by its first line: `;`, a tab or `|` where commas do not."""
    if ".tsv" in file.suffixes:
        return "\t"
    return next((one for one in ",;\t|" if len(next(csv.reader([line], delimiter=one), ())) > 1), ",")


def csv_rows(file: Path, opened: TextIO) -> "csv.DictReader[str]":
    """Return a reader of the rows of an opened CSV; a column without a name gets the one that pandas gives it."""
    line = opened.readline()
    rows = csv.DictReader(chain([line], opened), delimiter=csv_separator(file, line))
    rows.fieldnames = [name or f"Unnamed: {number}" for number, name in enumerate(rows.fieldnames or ())]
    return rows


def surplus_cells(row: Mapping[Any, Any]) -> str | None:
    """Return what is wrong with a row of `csv_rows` that has more cells than there are names; None for others."""
    if None not in row:
        return None
    remedy = "put cells that hold the separator into double quotes, and write a quote in them twice"
    if not any(row[None]):
        remedy = "it ends in a separator, so end line 1 in one too"
    return f"has {len(row) - 1 + len(row[None])} cells, and line 1 has {len(row) - 1} names: {remedy}"


def first_row(file: Path) -> dict[str, Any] | None:
    """Return the first row of a file of JSON or CSV; None for other files, and where it cannot be read."""
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as opened:
            if plain.suffix in (".csv", ".tsv"):
                return next(csv_rows(file, opened), None)
            if plain.suffix not in (".jsonl", ".json", ".ndjson"):
                return None
            text = opened.read(LONGEST_LINE).lstrip()
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    return _first_object(text)


def _first_object(text: str) -> dict[str, Any] | None:
    """Return the first object of JSON lines, or of a list of objects."""
    try:
        row, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
