"""`upweight methods`: the training methods, and what each reads and needs."""

from collections.abc import Iterator
from pathlib import Path

from upweight.config.config import how_to_choose
from upweight.config.peers import FORMAT_NAMES
from upweight.config.schema import section_rows, summary_of
from upweight.config.user_method import register_method
from upweight.errors import UserError, did_you_mean
from upweight.methods import METHODS
from upweight.methods.base import Method
from upweight.user_modules import is_path


def run(name: str | None) -> None:
    """Print all methods, or one with its keys and needs."""
    if name is None:
        width = max(map(len, METHODS))
        for known, method in METHODS.items():
            print(f"{known:<{width}}  {summary_of(method)}")
        print("`upweight methods NAME` prints the keys and needs of one; yours is named as mine.Method.")
        return
    if name not in METHODS and not is_path(name):
        remedy = "A method of yours is named by its path: mine.Method, or mine.py:Method."
        raise UserError(f"there is no method '{name}'.{did_you_mean(name, METHODS)} {remedy}")
    print("\n".join(described(METHODS[name] if name in METHODS else register_method(name, Path.cwd()))))


def described(kind: type[Method]) -> Iterator[str]:
    """Yield the lines about a method: how to choose it, its needs, its keys."""
    method = kind()
    yield f"{how_to_choose(kind.name)}: {summary_of(kind)}"
    reader = ", or rows without `type`, which it reads itself" if kind.read_row is not None else ""
    yield f"rows: {kind.formats()} ({', '.join(FORMAT_NAMES[kind.formats()])}{reader})"
    yield f"data: {'sampled while it trains (online)' if method.online else 'fixed (offline)'}"
    yield f"reference model: {'needed with its defaults' if method.needs_reference else 'not needed with its defaults'}"
    yield f"also computed: {', '.join(sorted(method.statistics)) or 'nothing beyond log-probs'}"
    whole_step = (
        "values of the whole step, which takes a second forward" if method.needs_preparation else "each row alone"
    )
    yield f"loss from: {whole_step}"
    lora = f", {kind.lora_learning_rate:g} with an adapter" if kind.lora_learning_rate else ""
    yield f"learning rate when left out: {kind.learning_rate:g}{lora}"
    yield "keys:"
    for path, value, default, text in section_rows(kind):
        yield f"  {path.replace('`', '')}: {text} ({value}{f'; {default}'.replace('`', '') if default else ''})"
