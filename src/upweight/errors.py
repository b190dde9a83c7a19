"""The one kind of error a person is meant to read, and the hint in it at what was probably meant."""

import copy
import importlib
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path
from types import TracebackType


class UserError(ValueError):
    """Something the user can mend: the command prints it without a traceback and exits 2.

    A ValueError, since scripts catch that around a bad argument. So where our code catches ValueError around a call
    that may raise this one, it lets this one through first.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what IPython, which alone asks for it, shows: the user's own lines, their cause, and the message."""
        shell = importlib.import_module("IPython").get_ipython()
        shown = copy.copy(self) if _is_of_packages(self.__cause__) else self  # a copy has no cause
        return shell.InteractiveTB.structured_traceback(type(self), shown, _before_ours(self.__traceback__))


def _before_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without what follows the first call into this package."""
    if trace is None or str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        return None
    return TracebackType(_before_ours(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _is_of_packages(cause: BaseException | None) -> bool:
    """Return whether an exception passed through no code but installed packages, whose lines a user cannot mend."""
    if cause is None or cause.__traceback__ is None:
        return False
    folders = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))
    files = [one.filename for one in traceback.extract_tb(cause.__traceback__)]
    return all(file.startswith(folders) or file.endswith((".pyx", ".pxi")) for file in files)  # Cython's are relative


class WrongTypeError(UserError, TypeError):
    """An argument of the wrong kind, or none of its name; a TypeError too, for scripts that catch that."""


def foreign_cause(error: BaseException) -> BaseException | None:
    """Return the first cause that is no UserError: what a script's traceback shows beside our message, if anything."""
    cause = error.__cause__
    while isinstance(cause, UserError):
        cause = cause.__cause__
    return cause


def closest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, or None if nothing is near."""
    plain = _lower_snake(word)
    best, nearest = min(cutoff, 0.5) if len(plain) <= 3 else cutoff, None
    matcher = SequenceMatcher(None, autojunk=False)
    matcher.set_seq2(plain)
    for candidate in candidates:
        other = _lower_snake(candidate)
        bonus = 0.1 if sorted(plain) == sorted(other) else 0.01 if plain[:1] == other[:1] else 0.0
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() + bonus >= best and matcher.quick_ratio() + bonus >= best:
            score = matcher.ratio() + bonus
            if score >= best and (nearest is None or score > best):
                best, nearest = score, candidate
    return nearest


def _lower_snake(word: str) -> str:
    return word.lower().replace("-", "_")


def did_you_mean(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?`, or nothing."""
    near = closest(word, candidates, cutoff)
    return f" Did you mean '{near}'?" if near else ""
