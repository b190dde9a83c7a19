"""Reading a YAML file strictly, and `key=value` overrides on top of it."""

import re
from pathlib import Path
from typing import Any

import yaml

from upweight.errors import UserError

MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `1e-5` is a number, a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is repeated", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Give the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text.") from error
    content = _parse(text, str(path))
    if content is None:
        raise UserError(f"{path}: is empty.")
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a mapping of keys to values, not {_kind(content)}.")
    return content


def apply_overrides(content: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The mapping with each `dotted.key=value` set; list items are reached by number (`datasets.0.path=x`)."""
    result = copy_tree(content)
    for item in overrides:
        key, equals, value = item.partition("=")
        parts = [part for part in re.split(r"[.\[\]]", key) if part]
        if not equals or not parts:
            raise UserError(f"{item}: an override is written key=value, such as trl.beta=0.01.")
        _set(result, parts, _parse(value, item), item)
    return result


def _set(target: Any, parts: list[str], value: Any, item: str) -> None:
    """Set a value at a path, making the mappings on the way."""
    *way, last = parts
    for part in way:
        target = _step(target, part, item)
    if isinstance(target, list):
        target[_index(target, last, item)] = value
    elif isinstance(target, dict):
        target[last] = value
    else:
        raise UserError(f"{item}: there is no mapping at '{'.'.join(way)}'.")


def _step(target: Any, part: str, item: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, item)]
    if not isinstance(target, dict):
        raise UserError(f"{item}: there is no mapping above '{part}'.")
    if target.get(part) is None:
        target[part] = {}
    return target[part]


def _index(target: list[Any], part: str, item: str) -> int:
    if not part.isdigit() or int(part) >= len(target):
        raise UserError(f"{item}: '{part}' must be a number below {len(target)} here.")
    return int(part)


def _parse(text: str, where: str) -> Any:
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise UserError(f"{where}:{place} {error.problem or 'not valid YAML'}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where}: not valid YAML ({first}).") from error
    if _too_deep(content):
        raise UserError(f"{where}: is nested more than {MAX_DEPTH} levels deep.")
    return content


def _too_deep(content: Any) -> bool:
    """Whether nesting goes beyond all use; also true for an anchor that contains itself."""
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in {id(part): part for part in level}.values()
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def copy_tree(content: Any) -> Any:
    """A copy of nested mappings and lists."""
    if isinstance(content, dict):
        return {key: copy_tree(value) for key, value in content.items()}
    if isinstance(content, list):
        return [copy_tree(value) for value in content]
    return content


def _kind(content: Any) -> str:
    return "a list" if isinstance(content, list) else f"the single value {content!r}"
