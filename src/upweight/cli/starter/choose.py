"""`upweight choose`: the questions in `choose.yaml`, from the data somebody has to the method that learns from it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.files import packaged_yaml

Question = Mapping[str, Any]  # flag, text and options
FIRST_QUESTION: Question = packaged_yaml(Path(__file__).with_suffix(".yaml"))


def run(flags: Mapping[str, str | None]) -> None:
    """Ask the questions that no flag answers, and print the command that starts with the method."""
    question: str | Question = FIRST_QUESTION
    while not isinstance(question, str):
        answer = flags.get(question["flag"]) or _ask(question)
        if answer not in question["options"]:
            raise UserError(f"{question['flag']} {answer}: {_list_choices(question)}")
        question = question["options"][answer]["next"]
    print(f"upweight init {question}")


def _ask(question: Question) -> str:
    """Ask on the terminal; return the answer given by number or by word."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"{question['text']} {_list_choices(question)}")
    words = list(question["options"])
    print(question["text"])
    for number, word in enumerate(words, 1):
        print(f"  {number}  {question['options'][word]['label']} ({word})")
    while True:
        answer = input("> ").strip()
        if answer in words:
            return answer
        if answer.isdigit() and 0 < int(answer) <= len(words):
            return words[int(answer) - 1]
        print(f"a number from 1 to {len(words)}, or one of {', '.join(words)}")


def _list_choices(question: Question) -> str:
    options = question["options"].items()
    return "Choose one of these:" + "".join(f"\n  {question['flag']} {word:<16}{to['label']}" for word, to in options)
