"""The sample rows of starters: a few facts and sums, in the format of each kind of data."""

from collections.abc import Callable, Iterator
from typing import Any

SampleRow = dict[str, Any]

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Greece": "Athens", "Norway": "Oslo", "Japan": "Tokyo",
    "Egypt": "Cairo", "Peru": "Lima", "Austria": "Vienna", "Poland": "Warsaw", "Kenya": "Nairobi", "Cuba": "Havana",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "early": "late", "tall": "short", "heavy": "light", "open": "closed", "full": "empty",
    "day": "night", "young": "old", "wet": "dry", "loud": "quiet", "far": "near", "rich": "poor",
}  # fmt: skip


def facts() -> Iterator[tuple[str, str, str]]:
    """A question, its answer in one sentence, and the word that matters."""
    for (country, city), (word, other) in zip(CAPITALS.items(), OPPOSITES.items(), strict=True):
        yield f"What is the capital of {country}?", f"The capital of {country} is {city}.", city
        yield f"What is the opposite of {word}?", f"The opposite of {word} is {other}.", other
    for a in range(2, 10):
        b = 3 * a % 7 + 2
        yield f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.", str(a + b)


def rambling(question: str, number: int) -> str:
    """An answer nobody wants."""
    about = question.removeprefix("What is ").removesuffix("?")
    return (
        f"That is a good question. People have often asked about {about}, and there is much to say about it",
        f"well, {about}... it depends on how you look at it, and on whom you ask, and on many other things",
        f"I could tell you about {about}, but first let me say something about the history of such questions",
    )[number % 3]


def pairs() -> Iterator[SampleRow]:
    """A better and a worse answer to each question."""
    for number, (question, answer, _) in enumerate(facts()):
        yield {"prompt": [message("user", question)], "chosen": [message("assistant", answer)],
               "rejected": [message("assistant", rambling(question, number))]}  # fmt: skip


def labelled() -> Iterator[SampleRow]:
    """One answer to each question, with a thumb up or down."""
    for number, (question, answer, _) in enumerate(facts()):
        good = number % 2 == 0
        shown = answer if good else rambling(question, number)
        yield {"prompt": [message("user", question)], "completion": [message("assistant", shown)], "label": good}


def demonstrations() -> Iterator[SampleRow]:
    """Conversations to imitate."""
    for question, answer, _ in facts():
        yield {"messages": [message("user", question), message("assistant", answer)]}


def prompts() -> Iterator[SampleRow]:
    """Questions, with a column that rewards read."""
    for question, _, word in facts():
        yield {"prompt": [message("user", f"{question} Answer in one short sentence.")], "answer": word}


def steps() -> Iterator[SampleRow]:
    """Sums worked out in steps, some of which are wrong."""
    for number in range(32):
        a, b, c = 11 + 7 * number % 40, 3 + 5 * number % 17, 2 + number % 5
        slip, later_slip = number % 3 == 1, number % 3 == 2
        first = a + b + slip
        second = first * c + later_slip
        yield {
            "prompt": f"What is ({a} + {b}) times {c}?",
            "completions": [f"First, {a} + {b} = {first}.", f"Then {first} times {c} = {second}."],
            "labels": [not slip, not slip and not later_slip],
        }


def tasks() -> Iterator[SampleRow]:
    """Counting by tools, as NeMo Gym's example server verifies it."""
    count = {"count": {"type": "integer", "description": "How much to add."}}
    tools = [_tool("increment_counter", "Add to the counter.", count), _tool("get_counter_value", "Read it.", {})]
    for number in range(16):
        start, first, second = number % 5, 1 + number % 4, 2 + number % 7
        request = f"Add {first} to the counter, then add {second}, then tell me its value."
        yield {
            "responses_create_params": {"input": [message("user", request)], "tools": tools},
            "initial_count": start,
            "expected_count": start + first + second,
        }


def _tool(name: str, description: str, properties: SampleRow) -> SampleRow:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "name": name, "description": description, "parameters": schema, "strict": True}


def message(role: str, content: str) -> dict[str, str]:
    """Return a message."""
    return {"role": role, "content": content}


ROWS: dict[str, Callable[[], Iterator[SampleRow]]] = {
    rows.__name__: rows for rows in (pairs, labelled, demonstrations, prompts, steps, tasks)
}
