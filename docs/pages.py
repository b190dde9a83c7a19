"""Writes the parts of these pages that come from the code: `python -m docs.pages`."""

import dataclasses
import json
import re
from pathlib import Path

from docs.api_page import api
from docs.format_rows import SHOWN

from upweight.config.config import how_to_choose
from upweight.config.schema import markdown
from upweight.methods import METHODS
from upweight.runs.health import EXPLAINED, RULES, Rule, RunKind, Sign
from upweight.train.api import configs, other_names
from upweight.train.api.configs import MethodArguments
from upweight.train.api.distill import DistillationConfig, GKDConfig
from upweight.train.api.fields import help_of
from upweight.train.api.grpo_config import GRPOConfig

MARK = "<!-- From here on made by `make docs`. -->\n"
RUNS: dict[RunKind, str] = {
    "online": "Online runs",
    "pairs": "Runs on preference pairs",
    "offline": "All offline runs",
}
KEY = re.compile(
    r"((?<!\w)(?:[a-z]+[./])?[a-z]+(?:_[a-z]+)+(?:\.\w+)?(?:: (?:true|false|none|[\d.]*\d))?|\w+\.jsonl|completions/"
    r"|(?:trl|ebft|distill)\.\w+)"
)
KTO_TOO = """
Every format of preference pairs can be used too: each pair becomes a good and a bad answer.
"""


def formats() -> str:
    """The end of `docs/formats.md`: a row of every format."""
    lines = [""]
    for kind, shown in SHOWN.items():
        names = [how_to_choose(name) for name, method in METHODS.items() if method.formats() == kind]
        lines += [f"## For {', '.join(names)}"]
        lines += [KTO_TOO] if kind == "labelled" else [""]
        lines += ["| `type` | a row |", "|---|---|"]
        for one in shown:
            names = ", ".join(f"`{name}`" for name in one.names())
            lines.append(f"| {names} | `{json.dumps(one.row, ensure_ascii=False)}` |")
        lines.append("")
    return "\n".join(lines)


def arguments() -> str:
    """The end of `docs/peers.md`: the key of every argument of a script's config."""
    classes = [one for one in vars(configs).values() if isinstance(one, type) and issubclass(one, MethodArguments)]
    kinds = [*(one for one in classes if hasattr(one, "method_class")), GRPOConfig, GKDConfig, DistillationConfig]
    named, nothing = {kind: _named_keys(kind) for kind in kinds}, {kind: _without_effect(kind) for kind in kinds}
    shared = dict(item for item in named[kinds[0]].items() if all(item in one.items() for one in named.values()))
    idle = set.intersection(*nothing.values())
    lines = [
        "",
        "### Every config",
        "",
        *_key_table(shared),
        "",
        f"Accepted, nothing to do: {_listed(idle)}.",
        "",
    ]
    lines += ["Not taken by configs that do not name them below:", "", "| argument | what to do |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in other_names.REPLACED.items()]
    for kind in kinds:
        lines += ["", f"### {kind.__name__}", ""]
        if further := {name: key for name, key in named[kind].items() if name not in shared}:
            lines += [*_key_table(further), ""]
        if scripts := _only_in_scripts(kind):
            lines += ["Arguments without a key, of scripts alone:", ""]
            lines += ["| argument | what it does |", "|---|---|"]
            lines += [*(f"| `{name}` | {text} |" for name, text in scripts.items()), ""]
        if more := nothing[kind] - idle:
            lines.append(f"Accepted, nothing to do: {_listed(more)}.")
        elif not further:
            lines.append("It has the arguments of every config.")
    return "\n".join([*lines, ""])


def _named_keys(kind: type[MethodArguments]) -> dict[str, str]:
    """The config key of every argument that sets one."""
    settings = {argument.name: help_of(argument).setting for argument in dataclasses.fields(kind)}
    return {name: key.path for name, key in settings.items() if key is not None}


def _only_in_scripts(kind: type[MethodArguments]) -> dict[str, str]:
    """The sentence about each argument that sets no key, of those that the class declares by itself."""
    helps = {one.name: help_of(one) for one in dataclasses.fields(kind) if one.name in vars(kind)["__annotations__"]}
    return {name: one for name, one in helps.items() if one and not (one.setting or one.no_effect or one.refused)}


def _without_effect(kind: type[MethodArguments]) -> set[str]:
    return {one.name for one in dataclasses.fields(kind) if help_of(one).no_effect}


def _key_table(keys: dict[str, str]) -> list[str]:
    return ["| argument | key |", "|---|---|", *(f"| `{name}` | `{key}` |" for name, key in keys.items())]


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def health() -> str:
    """The end of `docs/stability.md`: the rules of each kind of run, alarms first, and what looks wrong and is not."""
    lines = []
    for kind, title in RUNS.items():
        lines += ["", f"## {title}", "", "| verdict | what it means | what to do |", "|---|---|---|"]
        for rule in sorted((one for one in RULES if one.kind == kind), key=lambda one: one.level):
            what = f"{_sentence(rule.meaning)} Judged by {_condition(rule)}."
            lines.append(f"| **{rule.name}** ({rule.level}) | {what} | {_sentence(rule.remedy)} |")
    lines += ["", "## What looks wrong and is not", "", "| what you see | why it is right |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in EXPLAINED.items()]
    return "\n".join(lines) + "\n"


def _condition(rule: Rule) -> str:
    *others, last = [f"`{sign.metric}` {_limit(sign)}".replace("|", "` or `") for sign in rule.signs]
    signs = f"{', '.join(others)} and {last}" if others else last
    how = f"on average over {rule.steps} steps" if rule.averaged else f"in every log of {rule.steps} steps"
    how = f"in every log since the first step, {rule.steps} steps or more" if rule.from_start else how
    late = f", from step {rule.after} on" if rule.after else ""
    return f"{signs}, {how}{late}" if rule.steps > 1 else f"{signs}, in an evaluation"


def _limit(sign: Sign) -> str:
    if sign.relation == "near":
        return f"within {sign.threshold:g} of 0" if sign.threshold > 1e-5 else "at 0"
    return f"{sign.relation} {sign.threshold:g}"


def _sentence(text: str) -> str:
    """A text of a terminal as a sentence of a page, its keys in code."""
    pieces = text.split("`")  # those at odd places are code already
    whole = "`".join(piece if number % 2 else KEY.sub(r"`\1`", piece) for number, piece in enumerate(pieces))
    return f"{whole[0].upper()}{whole[1:]}{'' if whole.endswith(('?', '.')) else '.'}"


def renewed(page: str, generated: str) -> str:
    """A page with what is made behind its mark; without a mark all of it is made."""
    written, mark, _ = page.partition(MARK)
    return written + mark + generated if mark else generated


PAGES = {"api.md": api, "config.md": markdown, "formats.md": formats, "peers.md": arguments, "stability.md": health}

if __name__ == "__main__":
    for name, make in PAGES.items():
        file = Path(__file__).with_name(name)
        file.write_text(renewed(file.read_text(encoding="utf-8"), make()), encoding="utf-8")
