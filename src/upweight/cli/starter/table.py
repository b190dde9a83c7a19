"""A user's rows, and the one place that decides which columns hold prompts, answers and marks of answers."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from upweight.data.columns import ANSWERED, ROLES, guess_columns, words_of
from upweight.data.raw_row import word_of
from upweight.errors import UserError, did_you_mean

PREFERENCE = ("prompt", "answer_a", "answer_b", "winner")  # roles of rows whose answers are compared by a column
NAMED = {"text": ("prompt", "completion"), "preference": PREFERENCE}  # what `--columns` calls roles, where it differs
ALIASES = {"instruction": "prompt", "output": "completion", "answer": "completion"}  # what roles may be called
MARKS = ("label", "winner")  # roles whose columns hold few and short values
PREFERS = {"preferred", "preference", "prefers", "prefer", "winner", "better", "best", "choice", "chosen", "selected",
           "pick", "picked", "vote", "verdict"}  # fmt: skip
UNDECIDED = {"", "tie", "tied", "draw", "equal", "same", "both", "neither", "none", "either", "unsure", "unclear",
             "beide", "keine", "keiner", "gleich", "gleichwertig", "unentschieden", "egal", "les deux", "aucun",
             "aucune", "egalite", "égalité", "ambos", "ambas", "ninguno", "ninguna", "empate", "nenhum", "nenhuma",
             "entrambi", "entrambe", "nessuno", "nessuna", "pareggio", "平", "平局"}  # fmt: skip
ORDERED = (("a", "b"), ("1", "2"), ("left", "right"), ("first", "second"))  # marks of the first and the second answer
FEW, SHORT = 5, 30  # values of a column of labels, and characters of one
GRADES = 3  # values of a column that marks rows as good or bad; one with more says what they are about


@dataclass(frozen=True)
class Preference:
    """A column that says which of two answers is better; `better` holds its values for each, None where unsure."""

    winner: str
    prompt: str | None
    answers: tuple[str, ...]
    better: tuple[list[str], list[str]] | None


@dataclass
class Table:
    """The first rows of a file, and what its user says of the columns and of the values of marks."""

    file: Path
    rows: Sequence[Mapping[str, Any]]
    named: Mapping[str, str] = field(default_factory=dict)  # columns by role
    meanings: Mapping[str, str] = field(default_factory=dict)  # of values: true, false, answer_a, answer_b
    good_from: float | None = None  # the rating from which on rows are good

    @cached_property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def roles(self, kind: str) -> dict[str, str]:
        """Return the column of each role of a kind of data; a role without a likely column is left out."""
        named = {role: self.named.get(role) or self.named.get(str(ALIASES.get(role, role))) for role in ROLES[kind]}
        guessed = guess_columns(kind, [name for name in self.columns if name not in self.named.values()])
        likely = {role: named[role] or guessed.get(role) for role in ROLES[kind]}
        return {role: name for role, name in likely.items() if name}

    def values(self, name: str) -> list[str]:
        """Return the different values of a column, as text."""
        return list(dict.fromkeys(word_of(row.get(name)) for row in self.rows))

    def with_values(self, text: str) -> "Table":
        """Return the table with what `--values` says of its marks."""
        with suppress(ValueError):
            lowest = float(text)
            return replace(self, good_from=int(lowest) if lowest.is_integer() else lowest)
        return replace(self, meanings=read_values(text, self.named))

    def texts(self) -> list[str]:
        """Return the columns that hold more than words, and more than dates."""
        texts = {name: [value for value in self.values(name) if " " in value] for name in self.columns}
        return [name for name, values in texts.items() if any(re.search(r"[^\W\d_]{2}", value) for value in values)]

    def ask_for(self, kind: str, known: Mapping[str, str] | None = None, more: str = "") -> str:
        """Return the command that says which columns are meant, with the columns that are recognised or likely."""
        given = self.likely(kind, known)
        return f"`upweight new {shlex.quote(str(self.file))} --columns {shlex.quote(given)}{more}`"

    def likely(self, kind: str, known: Mapping[str, str] | None = None) -> str:
        """Return the columns of all roles, as `--columns` takes them: those that are recognised, else likely ones."""
        column_of = {ALIASES.get(role, role): name for role, name in self.roles(kind).items()} if kind in ROLES else {}
        roles = NAMED.get(kind) or ROLES[kind]
        column_of |= {**(known or {}), **{role: name for role, name in self.named.items() if role in roles}}
        left = [name for name in self.columns if name not in column_of.values()]
        texts = [name for name in left if name in self.varied_texts()]
        marks = [name for name in left if self._is_mark(name)]
        for role in roles:
            likely = marks if role in MARKS else texts
            if role not in column_of:
                column_of[role] = likely.pop(0) if likely else "..."
        return ",".join(f"{role}={column_of[role]}" for role in roles)

    def likely_kind(self) -> str:
        """Return the kind of data that rows may be of which no column is recognised."""
        is_marked = any(self._is_mark(name) and len({*self.values(name)} - {""}) <= GRADES for name in self.columns)
        kinds = (("prompts", "prompts"), ("text", "labelled"), ("pairs", "preference"))
        return kinds[min(max(len(self.varied_texts()), 1), 3) - 1][is_marked]

    def varied_texts(self) -> list[str]:
        """Return the columns of text that may be prompts or answers: most cells are filled, and not with the same."""
        filled = {name: sum(bool(word_of(row.get(name))) for row in self.rows) for name in self.columns}
        few = len(self.rows) <= 2
        return [
            name for name in self.texts() if few or (2 * filled[name] > len(self.rows) and len(self.values(name)) > 1)
        ]

    def _is_mark(self, name: str) -> bool:
        values = self.values(name)
        is_number_of_row = len(values) == len(self.rows) > 2
        return 1 < len(values) <= FEW and name not in self.texts() and not is_number_of_row

    def preference(self) -> Preference | None:
        """Return the column that says which of two answers is better, if there is one."""
        if winner := self.named.get("winner"):
            return self._preference(winner)
        paired = {"chosen", "rejected"} <= self.roles("pairs").keys()
        for name in () if self.named else self.columns:
            marks = {plain(value) for value in self.values(name)} - UNDECIDED
            named = self._named_by(name, marks)
            prefers = bool(PREFERS & set(words_of(name)))
            is_sure = len(named) > (0 if prefers else 1) and (prefers or all(map(_is_answer, named)))
            compares = prefers and len(self._answers(name)) > 1 and not paired and len(marks) <= FEW
            if marks and (is_sure or compares or self._names_answers(name, marks)):
                return self._preference(name)
        return None

    def _names_answers(self, winner: str, marks: set[str]) -> bool:
        """Return whether marks name answers, but for words whose meaning is not known; other numbers are ratings."""
        columns = [name for name in self.columns if name != winner]
        strays = {mark for mark in marks if not any(mark in _tags(name) for name in columns)}
        named = self._named_by(winner, marks - strays)
        has_words = not any(letter.isdigit() for mark in strays for letter in mark)
        return has_words and len(marks) <= FEW and len(named) > 1 and all(map(_is_answer, named))

    def _preference(self, winner: str) -> Preference:
        marks = [value for value in self.values(winner) if plain(value) not in UNDECIDED]
        answers = tuple(self.named[role] for role in PREFERENCE[1:3] if role in self.named)
        answers = answers if len(answers) == 2 else self._answers(winner)
        return Preference(winner, self._prompt(winner, answers), answers, self._better(marks, answers))

    def _prompt(self, winner: str, answers: Sequence[str]) -> str | None:
        """Return the column with the prompts: by its name, or the one column of text that is left."""
        left = [name for name in self.columns if name not in (winner, *answers)]
        texts = [name for name in left if name in self.texts()]
        by_name = self.named.get("prompt") or guess_columns("prompts", left).get("prompt")
        return by_name or (texts[0] if len(texts) == 1 else None)

    def _named_by(self, winner: str, marks: set[str]) -> list[str]:
        """Return the columns that marks name, if each mark names one column and no other."""
        others = [name for name in self.columns if name != winner]
        named = [[name for name in others if mark in _tags(name)] for mark in marks]
        return list(dict.fromkeys(names[0] for names in named)) if all(len(names) == 1 for names in named) else []

    def _answers(self, winner: str) -> tuple[str, ...]:
        """Return the two columns that are compared; others than two where that is not sure."""
        named = self._named_by(winner, {plain(value) for value in self.values(winner)} - UNDECIDED)
        if len(named) < 2 and PREFERS & set(words_of(winner)):
            named = self._compared_texts(winner)
        if len(named) > 1:
            return tuple(sorted(named, key=self.columns.index))
        answers = [name for name in self.columns if name != winner and _is_answer(name)]
        if len(answers) > 2:  # of which two may be named alike, as reply_a and reply_b
            stems = [plain(name).split()[:-1] for name in answers]
            alike = [name for name, stem in zip(answers, stems, strict=True) if stem and stems.count(stem) > 1]
            answers = alike or answers
        return tuple(answers)

    def _compared_texts(self, winner: str) -> list[str]:
        """Return two columns of text that some marks name, or that `a` and `b` or the like can only mean."""
        marks = {plain(value) for value in self.values(winner)} - UNDECIDED
        texts = [name for name in self.texts() if name != winner]
        named = [name for name in texts if marks & _tags(name)]
        if len(named) == 2:
            return named
        prompt = guess_columns("prompts", texts).get("prompt")
        left = [name for name in texts if name != prompt]
        is_ordered = any(marks == set(order) for order in ORDERED)
        return left if prompt and is_ordered and len(left) == 2 else []

    def _better(self, marks: Sequence[str], answers: Sequence[str]) -> tuple[list[str], list[str]] | None:
        """Return the marks that stand for the first and for the second answer; None unless each mark stands for one."""
        if len(answers) != 2:
            return None
        ways = [tuple([mark for mark in marks if self.meanings.get(mark) == role] for role in PREFERENCE[1:3])]
        if not any(ways[0]):
            ways = [tuple([mark for mark in marks if plain(mark) in _tags(name)] for name in answers)]
            ways += [tuple([mark for mark in marks if plain(mark) == one] for one in order) for order in ORDERED]
            ways = [way for way in ways if sorted([*way[0], *way[1]]) == sorted(marks)]
        return (ways[0][0], ways[0][1]) if marks and ways else None


def plain(value: Any) -> str:
    """Return the words and numbers of a value or of a column's name, in lower case."""
    return " ".join(re.findall(r"[^\W\d_]+|\d+", str("" if value is None else value).lower()))


def _tags(name: str) -> set[str]:
    """Return what a mark may call a column: all of its name, or the end of it."""
    return {plain(name), *plain(name).split()[-1:]}


def _is_answer(name: str) -> bool:
    return bool(set(ANSWERED) & set(words_of(name))) and not PREFERS & set(words_of(name))


def read_columns(text: str, columns: Sequence[str]) -> dict[str, str]:
    """Return the columns by role that `--columns` names."""
    roles = list(dict.fromkeys(role for one in (*NAMED.values(), *ROLES.values()) for role in one))
    named = _assignments("--columns", text, "prompt=Question,completion=Answer")
    for role, column in named.items():
        if role not in (*roles, *ALIASES):
            raise UserError(f"--columns {role}=...: no role. Roles are {', '.join(roles)}.{did_you_mean(role, roles)}")
        if column not in columns:
            near = did_you_mean(column, columns)
            raise UserError(f"--columns {role}={column}: no such column. There are {', '.join(columns)}.{near}")
    if len(set(named.values())) < len(named):
        raise UserError(f"--columns {text}: a column has two roles. Name each column once.")
    plain_roles = [ALIASES.get(role, role) for role in named]
    if twice := [role for role in plain_roles if plain_roles.count(role) > 1]:
        raise UserError(f"--columns {text}: names a column for {twice[0]!r} twice. Name one.")
    return dict(zip(plain_roles, named.values(), strict=True))


def read_values(text: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Return what `--values` says that the values of labels or of a column of preferences stand for."""
    meanings = _assignments("--values", text, "good=true,bad=false (or the lowest good rating alone: 4)")
    allowed = PREFERENCE[1:3] if "winner" in columns else ("true", "false")
    if wrong := [meaning for meaning in meanings.values() if meaning not in allowed]:
        raise UserError(f"--values ...={wrong[0]}: expected {' or '.join(allowed)} after each value.")
    return meanings


def assigned(values: Iterable[str], meaning: str) -> str:
    """Return the option `--values` in which each value stands for the same."""
    listed = list(values)
    return (";" if any("," in value for value in listed) else ",").join(f"{value}={meaning}" for value in listed)


def _assignments(option: str, text: str, example: str) -> dict[str, str]:
    """Return what is on both sides of each `=`; with `;` between them, names may hold commas and end in digits."""
    parts = [one.partition("=") for one in (text.split(";") if ";" in text else re.split(r",(?=[^,=]+=)", text))]
    if not all(left.strip() and right.strip() for left, _, right in parts):
        problem = f"expected NAME=NAME with commas between, as {option} {example}"
        raise UserError(f"{option} {text}: {problem}; or with semicolons, where names have commas.")
    return {left.strip(): right.strip() for left, _, right in parts}
