"""Cases of a parametrized test, of which `make test` runs a few and `make test-slow` the others."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_except(fast: Iterable[Any], cases: Iterable[Any], name: Callable[[Any], Any] = lambda case: case) -> list[Any]:
    """The cases, marked slow where their name is not in `fast`."""
    kept, all_cases = list(fast), list(cases)
    assert all(one in [name(case) for case in all_cases] for one in kept), "a fast case is not among the cases"
    marked = (case if isinstance(case, tuple) else (case,) for case in all_cases)
    return [
        pytest.param(*values, marks=[] if name(case) in kept else pytest.mark.slow)
        for case, values in zip(all_cases, marked, strict=True)
    ]
