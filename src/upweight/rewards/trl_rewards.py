"""Reward functions with TRL's names and arguments, for scripts."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from upweight.errors import UserError
from upweight.rewards.builtin.correctness import alarm_limit, math_verify
from upweight.rewards.builtin.measures import CosineLengthReward, RepetitionReward
from upweight.rewards.builtin.text import ScoreList, texts_of

Ids = list[list[int]]
Log = Callable[[str, list[Any]], None] | None
Comparison = tuple[float | None, str, str]  # the score, and the solution and the answer as they were read
UNREADABLE = "[unparseable]"
UNFINISHED: Comparison = (0.0, "[incomplete reasoning]", "[incomplete reasoning]")


def accuracy_reward(completions: list[Any], solution: list[str], log_extra: Log = None, **kwargs: Any) -> ScoreList:
    """Return 1 if the LaTeX answer of a completion equals the solution by algebra, else 0; None without a solution."""
    pairs = zip(texts_of(completions), solution, strict=True)
    return _log_comparisons([_compare_latex(text, gold) for text, gold in pairs], solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Any],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Log = None,
    **kwargs: Any,
) -> ScoreList:
    """Return `accuracy_reward` of the text after the reasoning; 0 if the reasoning does not end."""
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    comparisons = []
    for text, gold in zip(texts_of(completions), solution, strict=True):
        delimiter = next((delimiter for delimiter in delimiters if delimiter in text), None)
        ended = delimiter is not None and _compare_latex(text.rpartition(delimiter)[2], gold)
        comparisons.append(ended or UNFINISHED)
    return _log_comparisons(comparisons, solution, log_extra)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 if a completion begins with `<think>`, has no second one, and closes it; else 0."""
    texts = [text.removeprefix("<think>") if text.startswith("<think>") else "" for text in texts_of(completions)]
    return [float("</think>" in text and "<think>" not in text) for text in texts]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., ScoreList]:
    """Return `accuracy_reward` scaled by length: short correct answers earn more, short wrong ones less."""
    scale = CosineLengthReward(
        max_length=max_len, right_short=max_value_correct, right_long=min_value_correct,
        wrong_short=min_value_wrong, wrong_long=max_value_wrong,
    )  # fmt: skip
    return _with_arguments(cosine_scaled_reward, scale)


def cosine_scaled_reward(
    scale: CosineLengthReward, completions: list[Any], solution: list[str], completion_ids: Ids, **kwargs: Any
) -> ScoreList:
    pairs = zip(accuracy_reward(completions, solution), completion_ids, strict=True)
    return [None if score is None else scale.scaled(score, len(ids)) for score, ids in pairs]


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """Return a reward: the penalty times the share of repeated n-grams of token ids."""
    if max_penalty > 0:
        raise UserError(f"max_penalty: {max_penalty} would reward repetition; use 0 or less.")
    penalty = RepetitionReward(ngram=ngram_size, unit="tokens", penalty=max_penalty)
    return _with_arguments(repetition_penalty_reward, penalty)


def repetition_penalty_reward(penalty: RepetitionReward, completion_ids: Ids, **kwargs: Any) -> ScoreList:
    return [penalty.penalised(ids) for ids in completion_ids]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return DAPO's length penalty (arXiv:2503.14476), from 0 to -1 over the last `soft_punish_cache` tokens."""
    return _with_arguments(soft_overlong_punishment_reward, max_completion_len - soft_punish_cache, soft_punish_cache)


def soft_overlong_punishment_reward(free: int, cache: int, completion_ids: Ids, **kwargs: Any) -> ScoreList:
    beyond = [max(len(ids) - free, 0) for ids in completion_ids]
    return [-min(excess / max(cache, 1), 1.0) if excess else 0.0 for excess in beyond]


def _with_arguments(function: Callable[..., Any], *values: Any) -> Callable[..., Any]:
    """Return a function with its first arguments given; unlike a closure, it can be pickled."""
    bound: Any = partial(function, *values)
    bound.__name__ = function.__name__
    return bound


def _compare_latex(text: str, gold: str) -> Comparison:
    """Compare a completion's LaTeX answer with the solution, which may have any form."""
    if find_spec("math_verify") is None:
        raise UserError("accuracy_reward: needs math-verify, which is not installed: pip install math-verify.")
    package, limit = math_verify(), alarm_limit(10)
    if limit is None:  # it warns about that at every call
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
    expected = package.parse(gold, parsing_timeout=limit)
    if not expected:
        return None, UNREADABLE, "[skipped]"
    form = package.LatexExtractionConfig(
        normalization_config=import_module("latex2sympy2_extended").NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    answer = package.parse(text, extraction_config=[form], extraction_mode="first_match", parsing_timeout=limit)
    correct = package.verify(expected, answer, timeout_seconds=alarm_limit(5))
    return float(correct), str(expected), str(answer) if answer else UNREADABLE


def _log_comparisons(comparisons: Sequence[Comparison], solution: Sequence[str], log_extra: Log) -> ScoreList:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold for _, gold, _ in comparisons])
        log_extra("answer_parsed", [answer for _, _, answer in comparisons])
    return [score for score, _, _ in comparisons]
