"""Reads a YAML file strictly and applies `key=value` overrides."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from upweight.errors import UserError, did_you_mean

MAX_DEPTH = 40
MAX_SIZE = 100_000  # values after anchors are expanded; a config has hundreds
ROWS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".arrow")  # endings of data
HINTS = {
    "found character '\\t'": "indent with spaces",
    "mapping values are not allowed here": "indent this line as its neighbours, or put a text with ': ' in quotes",
    "found unhashable key": "put a text that contains '{' in quotes",
    "expected <block end>": "keys of one mapping begin in the same column, dashes of one list too: indent as above",
    "expected the node content": "put the value in quotes",
    "but found another document": "a config is one document: remove the line '---'",
}


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `1e-5` as a number and rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"key '{key}' is repeated, after line {seen[key]}; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_SIZE:  # merges of merges grow by a power
            raise yaml.constructor.ConstructorError(None, None, "far too many merged keys", node.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    if str(path).startswith("--"):
        raise UserError(f"{path}: the config comes first, then what is set: CONFIG {path} ...")
    if path.suffix.lower() in ROWS and path.is_file():
        raise UserError(f"{path}: is a file of rows, not a config. `upweight new {path}` writes a config for it.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        beside = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
        meant = did_you_mean(path.name, sorted(one.name for one in beside))
        raise UserError(f"{path}: cannot be read ({error.strerror}). Give the path of a YAML file.{meant}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text. Save it as UTF-8.") from error
    content = _parse(text, str(path))
    if content is None:
        raise UserError(f"{path}: is empty. A config names at least 'base_model' and 'datasets'.")
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping of keys to values, not {_describe_content(content)}.")
    return content


def apply_overrides(content: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return the mapping with each `dotted.key=value` set; `datasets.0.path=x` sets or adds an entry of a list."""
    result = copy_tree(content)
    for item in joined_options(overrides):
        key, equals, value = item.partition("=")
        parts = [part for part in re.split(r"[.\[\]]", key.strip()) if part]
        if not equals or not parts or len(parts) > MAX_DEPTH:
            example = f"{item}=VALUE" if re.fullmatch(r"[A-Za-z_][\w.]{0,60}", item) else "trl.beta=0.01"
            problem = "a key is set by key=value, without spaces around the '='"
            raise UserError(f"{item[:80]}: {problem}, such as {example}.")
        _set_value(result, parts, value if " #" in value else _parse(value, item), item)
    return result


def joined_options(overrides: list[str]) -> Iterator[str]:
    """Convert `--micro-batch-size 2`, `--trl.beta=0.1`, `--no-bf16` to `micro_batch_size=2`, `trl.beta=0.1`, ..."""
    items = iter(overrides)
    following = iter([*overrides[1:], None])
    for item in items:
        after = next(following)
        if not item.startswith("--"):
            yield item
            continue
        key, equals, value = item[2:].partition("=")
        is_switch = not equals and key != "set" and (after is None or after.startswith("--"))
        if is_switch:
            yield f"{key.removeprefix('no-').replace('-', '_')}={'false' if key.startswith('no-') else 'true'}"
            continue
        if not equals:
            value = next(items, None)
            next(following, None)
        if key == "set":  # as other programs write it
            if value is None or "=" not in value:
                problem = f"--set{'' if value is None else f' {value[:80]}'}: write --set key=value"
                raise UserError(f"{problem}, such as --set learning_rate=1e-5 or --set trl.beta=0.01.")
            yield value
            continue
        yield f"{key.replace('-', '_')}={value}"


def _set_value(target: Any, parts: list[str], value: Any, item: str) -> None:
    """Set a value at a path and create missing mappings and lists."""
    for number, part in enumerate(parts[:-1]):
        key = _key_or_index(target, part, ".".join(parts[:number]), item)
        if target[key] is None:
            target[key] = [] if re.fullmatch(r"-?\d+", parts[number + 1]) else {}
        target = target[key]
    target[_key_or_index(target, parts[-1], ".".join(parts[:-1]), item)] = value


def _key_or_index(target: Any, part: str, above: str, item: str) -> str | int:
    """Return the key or index of `part` in `target`, and add an empty entry for a new one."""
    if isinstance(target, dict):
        target.setdefault(part, None)
        return part
    if not isinstance(target, list):
        raise UserError(f"{item}: '{above}' is {_describe_content(target)}: it has no '{part}' in it.")
    size = len(target)
    if not (part.isascii() and part.isdigit()):
        entries = f"its entries are 0 to {size - 1}" if size else "it has no entries yet"
        raise UserError(f"{item}: '{above}' is a list, '{part}' no number in it; {entries}, {above}.{size} adds one.")
    if int(part) > size:
        raise UserError(f"{item}: '{above}' has no entry {size} before this one: {above}.{size} is the next to set.")
    if int(part) == size:
        target.append(None)
    return int(part)


def _parse(text: str, where: str) -> Any:
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = " ".join(str(error.problem or "not valid YAML").split())
        hint = next((f"; {hint}" for sign, hint in HINTS.items() if sign in f"{error.context} {problem}"), "")
        raise UserError(f"{where}:{position} {problem}{hint}.") from error
    except RecursionError as error:
        raise UserError(f"{where}: is nested too deeply.") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML lets such errors through for values that do not fit their tag or look like a date or number.
        raise UserError(f"{where}: not valid YAML: a value does not fit its kind ({error}). Quote it.") from error
    if _expanded_size(content) > MAX_SIZE:
        raise UserError(f"{where}: is nested more than {MAX_DEPTH} levels deep, or far too large.")
    return content


def _expanded_size(content: Any, depth: int = 0, known: dict[int, int] | None = None) -> int:
    """Count the values with every anchor expanded, without expanding any; more than MAX_SIZE for a cycle."""
    if depth > MAX_DEPTH:
        return MAX_SIZE + 1
    known = {} if known is None else known
    if not isinstance(content, dict | list):
        return 1
    if id(content) not in known:
        known[id(content)] = MAX_SIZE + 1  # if it is reached again before its size is known, it contains itself
        inner = content.values() if isinstance(content, dict) else content
        known[id(content)] = 1 + sum(_expanded_size(item, depth + 1, known) for item in inner)
    return known[id(content)]


def copy_tree(content: Any, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a copy of nested mappings and lists, with `change` of each value in them."""
    if isinstance(content, dict):
        return {key: copy_tree(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [copy_tree(value, change) for value in content]
    return change(content)


def _describe_content(content: Any) -> str:
    return "a list" if isinstance(content, list) else f"the single value {content!r}"
