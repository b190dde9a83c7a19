"""Sums of three numbers: `python problems.py` writes the rows; the reward is below.

Half of the answers to imitate are worked in two lines, half are the number alone: a model that imitates them writes
either. Which of them is right more often is for the second stage to learn.
"""

import json
import random
from pathlib import Path

HELD_OUT, ANSWERED, ASKED = 512, 4000, 8000


def correct(completions, answer, **kwargs) -> list[float]:
    """1 where what follows the last #### is the right number; without a ####, the whole text has to be it."""
    written = [text[-1]["content"].rpartition("####")[2].strip() for text in completions]
    return [float(number == right) for number, right in zip(written, answer, strict=True)]


def problem(draw: random.Random) -> tuple[str, str, str]:
    """A question, an answer to imitate, and the number."""
    a, b, c = (draw.randint(10, 99) for _ in range(3))
    first, second = draw.choice("+-"), draw.choice("+-")
    half = a + b if first == "+" else a - b
    number = half + c if second == "+" else half - c
    worked = f"{a} {first} {b} = {half}\n{half} {second} {c} = {number}\n" if draw.random() < 0.5 else ""
    return f"What is {a} {first} {b} {second} {c}?", f"{worked}#### {number}", str(number)


def write_rows(folder: Path) -> None:
    """Problems to imitate, problems to try, and problems that neither has."""
    draw = random.Random(0)
    drawn = {question: (written, number) for question, written, number in (problem(draw) for _ in range(20_000))}
    rows = [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": written}],
            "prompt": [{"role": "user", "content": question}],
            "answer": number,
        }
        for question, (written, number) in drawn.items()
    ]
    ends = HELD_OUT, HELD_OUT + ANSWERED, HELD_OUT + ANSWERED + ASKED
    parts = {"held_out": rows[: ends[0]], "answered": rows[ends[0] : ends[1]], "asked": rows[ends[1] : ends[2]]}
    for name, part in parts.items():
        columns = ("messages",) if name == "answered" else ("prompt", "answer")
        lines = [json.dumps({column: row[column] for column in columns}) for row in part]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path())
