"""A warehouse to ask, and the reward for a right answer."""

import json
from pathlib import Path

STOCK = json.loads(Path(__file__).with_name("stock.json").read_text(encoding="utf-8"))


def in_stock(item: str) -> int:
    """Say how many of an item are in the warehouse.

    Args:
        item: Name of the item, in the singular.
    """
    return STOCK[item]


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 where the last message names the number that the warehouse knows."""
    told = zip(completions, answer, strict=True)
    return [float(talk[-1]["role"] == "assistant" and number in talk[-1]["content"]) for talk, number in told]
