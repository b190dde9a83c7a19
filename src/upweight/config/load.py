"""Reads a YAML file into a checked Config, or raises one error that lists all that is wrong."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from upweight.config.config import SECTIONS, Config, ConfigError, blocks, general_keys, how_to_choose, method_keys
from upweight.config.explain import brief, explain, rename_unknown, show
from upweight.config.modernise import Findings, Spelling, asks_for_something, modernise
from upweight.config.peers import ATTENTION_SWITCHES, SATISFIED, why_refused
from upweight.config.resolve import resolve
from upweight.config.rules import check
from upweight.config.sections.data import DatasetSpec
from upweight.config.stages import parse_stages
from upweight.config.user_method import with_registered
from upweight.config.yaml_file import apply_overrides, copy_tree, read_yaml
from upweight.errors import closest
from upweight.methods import METHODS
from upweight.methods.users.function import path_of
from upweight.settings import Section

AnySection = TypeVar("AnySection", bound=Section)
MOST_SUGGESTIONS = 50  # finding the closest key is slow, and nobody reads more suggestions than this


def load_config(
    path: Path | str, overrides: Sequence[str] = (), *, fragment: bool = False, folder: Path | None = None
) -> Config:
    """Read a YAML file with overrides applied; with `fragment`, keys that a complete config requires may be missing.

    Files that it names are looked for in `folder` too, else in that of the file.
    """
    path = Path(path)
    content = apply_overrides(read_yaml(path), list(overrides))
    return parse_config(content, folder=folder or path.resolve().parent, fragment=fragment)


def parse_config(content: dict[Any, Any], *, folder: Path, fragment: bool = False) -> Config:
    """Build the checked config from a mapping of YAML keys."""
    if content.get("stages") is not None:
        parse = partial(parse_config, folder=folder, fragment=fragment)
        method_of = lambda stage: _method_name(with_registered(stage, folder), fragment=False)  # noqa: E731
        return parse_stages(content, parse, method_of)
    findings, content = Findings(), with_registered(content, folder)
    flat, meant = _flatten(modernise(content, findings), findings)
    _find_model_beside(flat, folder, findings)
    draft, unknown = _Draft(_method_name(flat, fragment), findings, {"folder": folder}, meant), len(findings.errors)
    for path, value in flat.items():
        draft.assign(path, value)
    sections: dict[str, Any] = {name: draft.build(name, cls) for name, cls in SECTIONS.items()}
    method = draft.build("method", METHODS[draft.method])
    config = resolve(Config(**sections, method=method, set_keys=flat, folder=folder))
    errors, warnings = check(config, fragment=fragment)
    findings.errors += errors
    is_guess = any(error.startswith("rl:") for error in findings.errors)  # the method of the draft
    findings.errors[unknown:] = [error for error in findings.errors[unknown:] if not _names(error, meant)]
    if is_guess:
        raise ConfigError(findings.errors, findings.notices)
    if findings.errors:
        raise ConfigError(findings.errors, (*findings.notices, *warnings), [config])
    return replace(config, notices=tuple(dict.fromkeys((*findings.notices, *warnings))))


def _find_model_beside(flat: dict[str, Any], folder: Path, findings: Findings) -> None:
    """Take a model that is not in the working folder from that of the config, as files of data are."""
    model = flat.get("base_model")
    if not isinstance(model, str) or not model or os.path.exists(os.path.expanduser(model)):
        return
    if os.path.exists(folder / model):  # a Path's method raises where the name is too long for one
        flat["base_model"] = str(folder / model)
        findings.notices.append(f"base_model: {model} is not in this folder, but beside the config: {folder / model}")


def _names(error: str, meant: list[str]) -> bool:
    """Whether an error names a key that is only thought to be meant: nobody can say yet that it is one."""
    return any(re.search(rf"(?<![\w.]){re.escape(path)}(?![\w.\[]*\w)", error) for path in meant)


def _flatten(content: dict[Any, Any], findings: Findings) -> tuple[dict[str, Any], list[str]]:
    """Return YAML path -> value for every known key that is set, and which of them unknown keys were likely meant for.

    Unknown keys are errors; with what they likely mean, the rules can be tried in the same round.
    """
    flat: dict[str, Any] = {}
    likely: dict[str, Any] = {}
    satisfied: dict[str, list[str]] = {}
    for path, value in _dotted_paths(content, findings):
        if path in general_keys() or path in method_keys():
            if value is not None:
                flat[path] = value
        elif path in SATISFIED:
            if asks_for_something(value):
                satisfied.setdefault(SATISFIED[path], []).append(path)
        elif reason := why_refused(path):
            if asks_for_something(value):
                findings.errors.append(f"{path}: {reason}")
        else:
            text, meant = "unknown key.", None
            if len(findings.errors) < MOST_SUGGESTIONS:
                text, meant = _suggestion(path, value)
            if meant is not None:
                inner = value.items() if meant in blocks() and isinstance(value, dict) else ()
                likely |= {f"{meant}.{key}": one for key, one in inner} if inner else {meant: value}
            findings.errors.append(f"{path if path.isprintable() else ascii(path)}: {text}")
    findings.notices += [Spelling(f"{', '.join(paths)}: nothing to do: {why}") for why, paths in satisfied.items()]
    is_known = lambda path: path in general_keys() or path in method_keys()  # noqa: E731
    likely = {path: one for path, one in likely.items() if path not in flat and is_known(path) and one is not None}
    return flat | likely, list(likely)


def _dotted_paths(content: dict[Any, Any], findings: Findings) -> Iterator[tuple[str, Any]]:
    """Yield every key as a dotted path (`trl.beta`) with its value."""
    for key, value in content.items():
        if key not in blocks():
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in value.items())
        elif value is not None:
            findings.errors.append(f"{key}: expected a mapping of keys, got {brief(value)}")


def _suggestion(path: str, value: Any) -> tuple[str, str | None]:
    """Return the error message for an unknown key, and the key that was likely meant, if one is."""
    known = [*general_keys(), *method_keys(), *SATISFIED, *ATTENTION_SWITCHES]
    block, _, name = path.rpartition(".")
    if not block and isinstance(value, dict) and (near := closest(name, blocks())):
        return f"unknown key. Did you mean '{near}'?", near
    parts = {key: key.rpartition(".") for key in known}
    places = [home for home, _, last in parts.values() if last == name]
    if name in DatasetSpec.model_fields and not block:
        places.append("datasets[...]")
    homes = [f"under '{home}'" if home else "at the top level" for home in dict.fromkeys(places)]
    prefixed = "".join(f"; with 'rl: {rl}' it is '{rl}_{name}'" for rl in METHODS if f"{rl}_{name}" in known)
    prefixed += f"; for preferences it is 'rl_{name}'" if f"rl_{name}" in known else ""
    if homes:
        meant = None if prefixed or len(homes) > 1 else f"{places[0]}.{name}".removeprefix(".")
        return f"belongs {' or '.join(homes)}{prefixed}", meant
    names = [last for home, _, last in parts.values() if home == block]
    effective = [last for key, (home, _, last) in parts.items() if home == block and key not in SATISFIED]
    if near := closest(name, effective, cutoff=0.7) or closest(name, names, cutoff=0.7):
        return f"unknown key. Did you mean '{near}'?", f"{block}.{near}".removeprefix(".")
    if elsewhere := closest(name, (last for _, _, last in parts.values()), cutoff=0.75):
        meant = next(key for key in known if parts[key][2] == elsewhere)
        return f"unknown key. Did you mean '{meant}'?", meant
    near = closest(name, names)
    advice = f" Did you mean '{near}'?" if near else " `upweight docs config` lists them all."
    if isinstance(value, dict | list):
        advice += " If it only holds a YAML anchor, define that where it is first used."
    return f"unknown key.{advice}", f"{block}.{near}".removeprefix(".") if near else None


def _method_name(flat: dict[str, Any], fragment: bool) -> str:
    """Return the method of a config; where it is mistyped the one that was likely meant, or that reads most keys.

    A fragment without one has the method that reads most of its keys too.
    """
    rl = flat.get("rl")
    for name, method in METHODS.items():
        if isinstance(rl, str) and rl in (name, path_of(method)):
            return name
    for key, method in (("reward_model", "orm"), ("process_reward_model", "prm")):
        if flat.get(key) is True:
            return method
    if isinstance(rl, str) and (near := closest(rl, METHODS)):
        return near
    if fragment or rl is not None:
        counts = {name: sum(name in method_keys().get(path, {}) for path in flat) for name in METHODS}
        return max(counts, key=lambda name: (counts[name], name == "sft"))
    return "sft"


@dataclass
class _Draft:
    """The values collected for each section, with the YAML path that set each of them."""

    method: str
    findings: Findings
    context: dict[str, Any]  # of validators
    meant: list[str]  # keys that unknown ones were likely meant for
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    used: dict[tuple[str, str], str] = field(default_factory=dict)

    def assign(self, path: str, value: Any) -> None:
        """Store a value under the section that reads its key."""
        if path in general_keys():
            section, key = general_keys()[path]
        elif self.method in method_keys()[path]:
            section, key = "method", method_keys()[path][self.method]
        else:
            methods = " or ".join(how_to_choose(method) for method in method_keys()[path])
            self.findings.errors.append(f"{path}: needs {methods}; this config has {how_to_choose(self.method)}")
            return
        slot, target = (section, key.name), self.values.setdefault(section, {})
        if slot in self.used and target[key.name] != value:
            self.findings.errors.append(f"{path}: contradicts '{self.used[slot]}', which means the same. Keep one.")
        else:
            self.used[slot], target[key.name] = path, value

    def build(self, name: str, cls: type[AnySection]) -> AnySection:
        """Build a section; invalid values are recorded as errors and dropped, so that rules still check the others."""
        values = self.values.get(name, {})
        try:
            return cls.model_validate(values, context=self.context)
        except ValidationError as error:
            valid, likely = dict(values), copy_tree(values)  # without what is wrong, and with what was likely meant
            for path, reason in explain(error, cls, values):
                slot = (name, str(path[0]) if path else "")
                where = how_to_choose(self.method) if name == "method" else show(path)
                where = show((self.used[slot], *path[1:])) if slot in self.used else where
                self.findings.errors.append(f"{where}: {reason}")
                valid.pop(slot[1], None)
                meant = rename_unknown(likely, path, cls) if slot[1] in likely else None
                if meant is None:
                    likely.pop(slot[1], None)
                else:
                    self.meant.append(show((self.used[slot], *meant[1:])))
        for rest in (likely, valid):
            with suppress(ValidationError):
                return cls.model_validate(rest, context=self.context)
        return cls()
