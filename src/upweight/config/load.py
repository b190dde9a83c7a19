"""One YAML file in, a checked Config out, or every error at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from upweight.config.config import SECTIONS, Config, blocks, general_keys, how_to_choose, method_keys
from upweight.config.explain import brief, explain, show
from upweight.config.modernise import Findings, asks_for_something, modernise
from upweight.config.peers import ATTENTION_SWITCHES, SATISFIED, why_refused
from upweight.config.resolve import resolve
from upweight.config.rules import check
from upweight.config.sections.data import DatasetRow
from upweight.config.stages import parse_stages
from upweight.config.yaml_file import apply_overrides, read_yaml
from upweight.errors import UserError, closest, did_you_mean
from upweight.methods import METHODS
from upweight.settings import Section

AnySection = TypeVar("AnySection", bound=Section)
MOST_SUGGESTIONS = 50  # looking for the nearest key takes time, and nobody reads more


def load_config(path: Path, overrides: Sequence[str] = (), *, fragment: bool = False) -> Config:
    """The config in a YAML file with overrides applied; `fragment` leaves out what a whole config must have."""
    content = apply_overrides(read_yaml(path), list(overrides))
    return parse_config(content, folder=path.resolve().parent, fragment=fragment)


def parse_config(content: dict[Any, Any], *, folder: Path, fragment: bool = False) -> Config:
    """The config that a mapping of YAML keys describes."""
    if content.get("stages") is not None:
        parse = partial(parse_config, folder=folder, fragment=fragment)
        return parse_stages(content, parse, lambda stage: _method_name(stage, fragment=False))
    findings = Findings()
    flat = _flatten(modernise(content, findings), findings)
    draft = _Draft(_method_name(flat, fragment), findings)
    for path, value in flat.items():
        draft.place(path, value)
    sections: dict[str, Any] = {name: draft.build(name, cls) for name, cls in SECTIONS.items()}
    method = draft.build("method", METHODS[draft.method])
    config = resolve(Config(**sections, method=method, given=flat, folder=folder))
    errors, warnings = check(config, fragment=fragment)
    findings.errors += errors
    if findings.errors:
        raise UserError("\n".join(dict.fromkeys(findings.errors)))
    return replace(config, notices=tuple(dict.fromkeys((*findings.notices, *warnings))))


def _flatten(content: dict[Any, Any], findings: Findings) -> dict[str, Any]:
    """YAML path -> value for every known key that is set; the rest becomes errors and notices."""
    flat: dict[str, Any] = {}
    satisfied: dict[str, list[str]] = {}
    for path, value in _paths(content, findings):
        if path in general_keys() or path in method_keys():
            if value is not None:
                flat[path] = value
        elif path in SATISFIED:
            if asks_for_something(value):
                satisfied.setdefault(SATISFIED[path], []).append(path)
        elif reason := why_refused(path):
            if asks_for_something(value):
                findings.errors.append(f"{path}: {reason}")
        elif len(findings.errors) < MOST_SUGGESTIONS:
            findings.errors.append(f"{_printable(path)}: {_where_it_belongs(path, value)}")
        else:
            findings.errors.append(f"{_printable(path)}: unknown key.")
    findings.notices += [f"{', '.join(paths)}: nothing to do: {reason}" for reason, paths in satisfied.items()]
    return flat


def _paths(content: dict[Any, Any], findings: Findings) -> Iterator[tuple[str, Any]]:
    """Every key of a config with its block before it."""
    for key, value in content.items():
        if key not in blocks():
            yield str(key), value
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in value.items())
        elif value is not None:
            findings.errors.append(f"{key}: expected a mapping of keys, got {brief(value)}")


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


def _where_it_belongs(path: str, value: Any) -> str:
    """What to say about a key that nobody knows."""
    known = [*general_keys(), *method_keys(), *SATISFIED, *ATTENTION_SWITCHES]
    block, _, name = path.rpartition(".")
    if not block and isinstance(value, dict) and closest(name, blocks()):
        return f"unknown key.{did_you_mean(name, blocks())}"
    homes = [other.rpartition(".")[0] for other in known if other.rpartition(".")[2] == name]
    if name in DatasetRow.model_fields and not block:
        homes.append("datasets[...]")
    homes = [f"under '{home}'" if home else "at the top level" for home in dict.fromkeys(homes)]
    own = "".join(f"; with 'rl: {rl}' it is '{rl}_{name}'" for rl in METHODS if f"{rl}_{name}" in known)
    if homes:
        return f"belongs {' or '.join(homes)}{own}"
    beside = [other for other in known if other.rpartition(".")[0] == block]
    siblings = [other.rpartition(".")[2] for other in beside]
    acting = [other.rpartition(".")[2] for other in beside if other not in SATISFIED]
    if near := closest(name, acting, cutoff=0.7) or closest(name, siblings, cutoff=0.7):
        return f"unknown key. Did you mean '{near}'?"
    elsewhere = closest(name, (other.rpartition(".")[2] for other in known), cutoff=0.75)
    full = next((other for other in known if elsewhere and other.rpartition(".")[2] == elsewhere), None)
    if full:
        return f"unknown key. Did you mean '{full}'?"
    return f"unknown key.{did_you_mean(name, siblings) or ' docs/config.md lists them all.'}"


def _method_name(flat: dict[str, Any], fragment: bool) -> str:
    """The method a config chooses; a fragment that does not say is taken for the one whose keys it uses."""
    rl = flat.get("rl")
    if isinstance(rl, str) and rl in METHODS:
        return rl
    if flat.get("reward_model") is True or flat.get("process_reward_model") is True:
        return "orm" if flat.get("reward_model") is True else "prm"
    if fragment or rl is not None:
        owned = {name: sum(name in method_keys().get(path, {}) for path in flat) for name in METHODS}
        return max(owned, key=lambda name: (owned[name], name == "sft"))
    return "sft"


@dataclass
class _Draft:
    """Values on their way into sections, and the YAML path each of them came from."""

    method: str
    findings: Findings
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    used: dict[tuple[str, ...], str] = field(default_factory=dict)

    def place(self, path: str, value: Any) -> None:
        """Put a value where its section reads it."""
        if path in general_keys():
            section, key = general_keys()[path]
        elif self.method in method_keys()[path]:
            section, key = "method", method_keys()[path][self.method]
        else:
            owners = " or ".join(how_to_choose(owner) for owner in method_keys()[path])
            self.findings.errors.append(f"{path}: needs {owners}; this config has {how_to_choose(self.method)}")
            return
        slot = (section, *key.where, key.name)
        target = self.values.setdefault(section, {})
        for part in key.where:
            target = target.setdefault(part, {})
        if slot in self.used and target[key.name] != value:
            self.findings.errors.append(f"{path}: contradicts '{self.used[slot]}', which means the same. Keep one.")
            return
        self.used[slot] = path
        target[key.name] = value

    def build(self, name: str, cls: type[AnySection]) -> AnySection:
        """A section from its values; what is wrong is noted and left out, so that rules can run on the rest."""
        values = self.values.get(name, {})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            for path, reason in explain(error, cls, values):
                self.findings.errors.append(f"{self.yaml_path(name, path)}: {reason}")
                values.pop(str(path[0]) if path else "", None)
        try:
            return cls.model_validate(values)
        except ValidationError:
            return cls()

    def yaml_path(self, section: str, path: tuple[str | int, ...]) -> str:
        """Where in the YAML a place inside a section's values stands."""
        for end in range(len(path), 0, -1):
            slot = (section, *map(str, path[:end]))
            if slot in self.used:
                return show((self.used[slot], *path[end:]))
        return how_to_choose(self.method) if section == "method" else show(path)
