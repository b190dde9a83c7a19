"""Methods say of themselves what others ask for: nobody looks inside them or asks which one they are."""

import ast
from pathlib import Path

from upweight.methods import METHODS

ROOT = Path(__file__).parents[2] / "src" / "upweight"
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "methods"]
CLASSES = {method.__name__ for method in METHODS.values()} | {"Method", "PolicyGradient"}


def names_in(node: ast.AST) -> set[str]:
    """The last part of every name in an expression."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def calls(name: str):
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_no_attribute_of_a_method_is_guessed():
    guessed = [place for place, call in calls("getattr") if {"method", "policy"} & names_in(call.args[0])]
    assert guessed == []


def test_nobody_asks_which_method_it_is():
    asked = [place for place, call in calls("isinstance") if CLASSES & names_in(call.args[1])]
    assert asked == []
