"""Sums to learn from: `python tasks.py` writes sums.jsonl; the rewards are below."""

import json
import random
import re
from pathlib import Path


def correct(completions, answer, **kwargs) -> list[float]:
    """1 where the only number in the answer is the right one."""
    found = [re.findall(r"-?\d+", text[-1]["content"]) for text in completions]
    return [float(numbers == [str(right)]) for numbers, right in zip(found, answer, strict=True)]


def close(completions, answer, **kwargs) -> list[float]:
    """Up to 0.5 for a first number near the right one, so that a wrong answer can be better than another."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        number = re.search(r"-?\d{1,6}", text[-1]["content"])
        rewards.append(0.5 / (1 + abs(int(number[0]) - int(right)) / 10) if number else 0.0)
    return rewards


def make_rows(count: int, seed: int = 0) -> list[dict]:
    """Sums and differences of numbers below 100."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = drawn.randrange(100), drawn.randrange(100)
        sign = drawn.choice("+-")
        question = f"What is {a} {sign} {b}? Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": str(a + b if sign == "+" else a - b)})
    return rows


if __name__ == "__main__":
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(4000)), encoding="utf-8")
