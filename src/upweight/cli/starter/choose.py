"""`upweight choose`: from the data somebody has to the method that learns from it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from upweight.errors import UserError


@dataclass(frozen=True)
class Question:
    """A question with its answers, by the word that a flag takes."""

    flag: str
    text: str
    options: Mapping[str, tuple[str, "str | Question"]]  # what it says, and the method or question it leads to


PAIRS = Question("--want", "What should come out, and how?", {
    "policy": ("a model that prefers the better answers (start here)", "dpo"),
    "one-stage": ("the same from a base model in one stage, without fine-tuning it first", "orpo"),
    "no-reference": ("the same with less memory: no reference model", "simpo"),
    "bounded": ("the same from few pairs, or pairs that are never wrong: DPO would go too far", "ipo"),
    "scores": ("a model that scores answers, for rewards or for picking the best", "reward"),
})  # fmt: skip
SCORING = Question("--want", "How do the scores compare?", {
    "sum": ("one score, or several on one scale (start here)", "grpo"),
    "apart": ("several of different sizes, each of which should count by itself", "gdpo"),
})  # fmt: skip
DEMONSTRATIONS = Question("--want", "What should be learned from them?", {
    "words": ("their words (start here)", "sft"),
    "meaning": ("what they are like, from the model's answers, compared by features", "ebft"),
})  # fmt: skip
FIRST = Question("--have", "What do you have?", {
    "scores": ("prompts, and a way to score answers: a function, right answers, tests, a reward model", SCORING),
    "pairs": ("pairs of a better and a worse answer", PAIRS),
    "labels": ("single answers marked as good or bad", "kto"),
    "demonstrations": ("answers as they should be", DEMONSTRATIONS),
    "steps": ("reasoning in steps, each marked as right or wrong", "prm"),
    "gym": ("an environment of NeMo Gym: tools, several turns, verification", "gym"),
})  # fmt: skip


def run(flags: Mapping[str, str | None]) -> None:
    """Ask the questions that no flag answers, and print the command that starts with the method."""
    question: str | Question = FIRST
    while isinstance(question, Question):
        answer = flags.get(question.flag) or _ask(question)
        if answer not in question.options:
            raise UserError(f"{question.flag} {answer}: {_choices(question)}")
        _, question = question.options[answer]
    print(f"upweight init {question}")


def _ask(question: Question) -> str:
    """Ask on the terminal; return the answer given by number or by word."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{question.text} {_choices(question)}")
    words = list(question.options)
    print(question.text)
    for number, (word, (text, _)) in enumerate(question.options.items(), 1):
        print(f"  {number}  {text} ({word})")
    while True:
        answer = input("> ").strip()
        if answer in words:
            return answer
        if answer.isdigit() and 0 < int(answer) <= len(words):
            return words[int(answer) - 1]
        print(f"a number from 1 to {len(words)}, or one of {', '.join(words)}")


def _choices(question: Question) -> str:
    listed = "".join(f"\n  {question.flag} {word:<16}{text}" for word, (text, _) in question.options.items())
    return f"Choose one of these:{listed}"
