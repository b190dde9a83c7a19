"""Values of a script's arguments: texts that stand for numbers, as a YAML file may have them."""

import dataclasses
from typing import Any

from pydantic import TypeAdapter, ValidationError

from upweight.config.explain import brief, describe
from upweight.errors import WrongTypeError
from upweight.settings import branches

NUMBERS = {int, float, bool}


def read_numbers(args: Any) -> None:
    """Replace texts by the numbers and switches that they stand for; raise for what stands for none, by arguments."""
    problems = []
    for one in dataclasses.fields(args):
        kind: Any = one.type
        value, kinds = getattr(args, one.name), set(branches(kind))
        is_cut = isinstance(value, float) and float not in kinds
        if kinds <= NUMBERS and (is_cut or isinstance(value, str | list | tuple | dict)):
            try:
                setattr(args, one.name, TypeAdapter(kind).validate_python(value))
            except ValidationError:
                problems.append(f"{one.name}: expected {describe(kind)}, got {brief(value)}.")
    if problems:
        raise WrongTypeError("\n".join(problems))
