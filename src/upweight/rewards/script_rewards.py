"""Rewards under the names that scripts import them by, with the arguments and the values that go with those names."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from upweight.errors import UserError
from upweight.rewards.builtin.correctness import math_verify
from upweight.rewards.builtin.lengths import CosineLengthReward
from upweight.rewards.builtin.penalties import RepetitionReward
from upweight.rewards.builtin.text import Scores, texts_of

Log = Callable[[str, list[Any]], None]
UNREADABLE = "[unparseable]"
UNFINISHED = "[incomplete reasoning]"


@dataclass(frozen=True)
class _Verdict:
    """What algebra says of a completion, and the two expressions it compared, as text."""

    score: float | None
    gold: str
    answer: str


def accuracy_reward(completions: list[Any], solution: list[str], log_extra: Log | None = None, **kwargs: Any) -> Scores:
    """1 where the LaTeX answer of a completion equals the solution by algebra, 0 where not, None for no solution."""
    pairs = zip(texts_of(completions), solution, strict=True)
    return _logged([_compared(text, gold) for text, gold in pairs], solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Log | None = None,
    **kwargs: Any,
) -> Scores:
    """`accuracy_reward` of what follows the reasoning; 0 where the reasoning does not end."""
    marks = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    verdicts = []
    for text, gold in zip(texts_of(completions), solution, strict=True):
        mark = next((mark for mark in marks if mark in text), None)
        ended = mark is not None and _compared(text.rpartition(mark)[2], gold)
        verdicts.append(ended or _Verdict(0.0, UNFINISHED, UNFINISHED))
    return _logged(verdicts, solution, log_extra)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where a completion begins with `<think>`, has no second one, and closes it; else 0."""
    texts = [text.removeprefix("<think>") if text.startswith("<think>") else "" for text in texts_of(completions)]
    return [float("</think>" in text and "<think>" not in text) for text in texts]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., Scores]:
    """`accuracy_reward` scaled by length: short right answers earn more, short wrong ones less."""
    return _CosineScaled(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """A penalty times the share of the n-grams of token ids that a completion has written before."""
    if max_penalty > 0:
        raise UserError(f"max_penalty: {max_penalty} would reward repetition; give 0 or less.")
    return _RepetitionPenalty(ngram_size, max_penalty)


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """DAPO's length penalty (arXiv:2503.14476): falls from 0 to -1 over the last `soft_punish_cache` tokens."""
    return _SoftOverlong(max_completion_len, soft_punish_cache)


@dataclass(frozen=True)
class _CosineScaled:  # classes rather than closures, which could not be sent to another process
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: list[Any], solution: list[str], completion_ids: list[Sequence[int]], **kwargs: Any
    ) -> Scores:
        scale = CosineLengthReward(
            max_length=self.max_len,
            right_short=self.max_value_correct,
            right_long=self.min_value_correct,
            wrong_short=self.min_value_wrong,
            wrong_long=self.max_value_wrong,
        )
        marks = zip(accuracy_reward(completions, solution), completion_ids, strict=True)
        return [None if mark is None else scale.scaled(mark, len(ids)) for mark, ids in marks]


@dataclass(frozen=True)
class _RepetitionPenalty:
    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: list[Sequence[int]], **kwargs: Any) -> list[float]:
        penalty = RepetitionReward(ngram=self.ngram_size, unit="tokens", penalty=self.max_penalty)
        return [penalty.penalised(ids) for ids in completion_ids]


@dataclass(frozen=True)
class _SoftOverlong:
    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[Sequence[int]], **kwargs: Any) -> list[float]:
        free = self.max_completion_len - self.soft_punish_cache
        beyond = [max(len(ids) - free, 0) for ids in completion_ids]
        return [-min(excess / max(self.soft_punish_cache, 1), 1.0) if excess else 0.0 for excess in beyond]


def _compared(text: str, gold: str) -> _Verdict:
    """A completion's answer, which has to be LaTeX, against the solution, in whatever form it is."""
    if find_spec("math_verify") is None:
        raise UserError("accuracy_reward: needs math-verify, which is not installed: pip install 'upweight[math]'.")
    package = math_verify()
    alarms = threading.current_thread() is threading.main_thread()  # its time limits are signals
    if not alarms:  # of which it warns at every call
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
    wanted = package.parse(gold, parsing_timeout=10 if alarms else None)
    if not wanted:
        return _Verdict(None, UNREADABLE, "[skipped]")
    form = package.LatexExtractionConfig(
        normalization_config=import_module("latex2sympy2_extended").NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    limit = 10 if alarms else None
    given = package.parse(text, extraction_config=[form], extraction_mode="first_match", parsing_timeout=limit)
    right = package.verify(wanted, given, timeout_seconds=5 if alarms else None)
    return _Verdict(float(right), str(wanted), str(given) if given else UNREADABLE)


def _logged(verdicts: Sequence[_Verdict], solution: Sequence[str], log_extra: Log | None) -> Scores:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [verdict.score for verdict in verdicts]
