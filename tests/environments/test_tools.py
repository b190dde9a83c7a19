"""Functions as tools: what the policy is told of them."""

import pytest

from upweight.environments.python_class import PythonEnvironment
from upweight.environments.tools import methods_of, schema_of
from upweight.errors import UserError


def look(key: str, count: int = 1) -> list[str]:
    """Look a thing up.

    Args:
        key: what to find.
        count: how often.
    """
    return [key] * count


class Shop:
    def reset(self, **row):
        """Not a tool."""

    def buy(self, thing: str) -> str:
        """Buy a thing.

        Args:
            thing: its name.
        """
        return thing

    def undocumented(self, x: int) -> int:
        return x

    def _hidden(self):
        """Not a tool."""


def test_hints_and_docstring_become_the_schema():
    told = schema_of(look, "tools")["function"]
    assert (told["name"], told["description"]) == ("look", "Look a thing up.")
    assert told["parameters"]["properties"]["count"] == {"type": "integer", "description": "how often."}
    assert told["parameters"]["required"] == ["key"]
    assert "return" not in told


def test_public_methods_with_docstrings_are_tools():
    tools = methods_of(Shop, "environment.class")
    assert list(tools) == ["buy"]
    assert tools["buy"]["function"]["parameters"]["required"] == ["thing"]


def test_what_cannot_be_described_is_named_with_the_remedy():
    def bare(x):
        """Do it."""

    def undescribed(x: int):
        """Do it."""

    for function in (bare, undescribed, lambda: 1):
        with pytest.raises(UserError, match=r"tools: '.*' cannot be described.*type hint.*Args:"):
            schema_of(function, "tools")


def test_names_of_tools_are_unique():
    def other():
        """Other."""

    other.__name__ = "look"
    with pytest.raises(UserError, match="two tools are named 'look'"):
        PythonEnvironment(functions=[look, other])
