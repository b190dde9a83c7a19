"""`upweight choose`: from the data somebody has to the method that learns from it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from upweight.errors import UserError


@dataclass(frozen=True)
class Option:
    """An answer: what it says, and the method or the question that it leads to."""

    text: str
    leads_to: "str | Question"


@dataclass(frozen=True)
class Question:
    """A question with its answers, by the word that a flag takes."""

    flag: str
    text: str
    options: Mapping[str, Option]


PAIRS = Question("--want", "What should come out, and how?", {
    "policy": Option("a model that prefers the better answers (start here)", "dpo"),
    "one-stage": Option("the same from a base model in one stage, without fine-tuning it first", "orpo"),
    "no-reference": Option("the same with less memory: no reference model", "simpo"),
    "bounded": Option("the same from few pairs, or pairs that are never wrong: DPO would go too far", "ipo"),
    "scores": Option("a model that scores answers, for rewards or for picking the best", "reward"),
})  # fmt: skip
SCORING = Question("--want", "How do the scores compare?", {
    "sum": Option("one score, or several on one scale (start here)", "grpo"),
    "apart": Option("several of different sizes, each of which should count by itself", "gdpo"),
})  # fmt: skip
DEMONSTRATIONS = Question("--want", "What should be learned from them?", {
    "words": Option("their words (start here)", "sft"),
    "meaning": Option("what they are like, from the model's own answers, compared by features", "ebft"),
})  # fmt: skip
FIRST = Question("--have", "What do you have?", {
    "scores": Option("prompts, and a way to score answers: a function, right answers, tests, a reward model", SCORING),
    "pairs": Option("pairs of a better and a worse answer", PAIRS),
    "labels": Option("single answers marked as good or bad", "kto"),
    "demonstrations": Option("answers as they should be", DEMONSTRATIONS),
    "steps": Option("reasoning in steps, each marked as right or wrong", "prm"),
    "gym": Option("an environment of NeMo Gym: tools, several turns, its own verification", "gym"),
})  # fmt: skip


def run(given: Mapping[str, str | None]) -> None:
    """Ask what was not given by a flag, and print the command that starts with the method."""
    question: str | Question = FIRST
    while isinstance(question, Question):
        said = given.get(question.flag) or _ask(question)
        if said not in question.options:
            raise UserError(f"{question.flag} {said}: {_choices(question)}")
        question = question.options[said].leads_to
    print(f"upweight init {question}")


def _ask(question: Question) -> str:
    """The answer of whoever sits at the terminal, by number or by word."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{question.text} {_choices(question)}")
    words = list(question.options)
    print(question.text)
    for number, (word, option) in enumerate(question.options.items(), 1):
        print(f"  {number}  {option.text} ({word})")
    while True:
        said = input("> ").strip()
        if said in words:
            return said
        if said.isdigit() and 0 < int(said) <= len(words):
            return words[int(said) - 1]
        print(f"a number from 1 to {len(words)}, or one of {', '.join(words)}")


def _choices(question: Question) -> str:
    listed = "".join(f"\n  {question.flag} {word:<16}{option.text}" for word, option in question.options.items())
    return f"Say one of these:{listed}"
