"""Writes the JSON schema of the config and `docs/config.md` from the help texts of the keys."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from upweight.config.config import SECTIONS, general_keys, how_to_choose, method_keys
from upweight.config.explain import describe
from upweight.config.peers import ATTENTION_SWITCHES, NO_EFFECT, OTHER_NAMES, REFUSED, RENAMED, SATISFIED
from upweight.config.sections.data import DatasetSpec, UserFormat
from upweight.config.sections.rollout import GymDataset
from upweight.methods import METHODS
from upweight.settings import Section, keys_of


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a complete config."""
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    of_methods = (next(iter(by_method.values())) for by_method in method_keys().values())  # the first that reads it
    for key in (*(key for _, key in general_keys().values()), *of_methods):
        field = key.field
        limited: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        schema = TypeAdapter(limited).json_schema()
        definitions.update(schema.pop("$defs", {}))
        block, _, name = key.path.rpartition(".")
        empty = {"type": ["object", "null"], "properties": {}, "additionalProperties": False}
        holder = properties.setdefault(block, empty)["properties"] if block else properties
        holder[name] = {"anyOf": [schema, {"type": "null"}], "description": field.description}
    for path, reason in SATISFIED.items():
        block, _, name = path.rpartition(".")
        holder = properties[block]["properties"] if block else properties
        holder.setdefault(name, {"description": f"Nothing to do: {reason}."})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Upweight config",
        "type": "object",
        "required": ["base_model"],
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def markdown() -> str:
    """Return `docs/config.md`: every key with its type, default and help text."""
    lines = [
        "# Config keys",
        "",
        "This page lists every key of a config, with its type, its default and its meaning. `upweight schema` prints",
        "the same as a JSON schema, which editors use to complete keys, and `upweight docs config --search KEY` finds",
        "a key here.",
        "",
        "```yaml",
        "base_model: HuggingFaceTB/SmolLM2-135M-Instruct",
        "datasets:",
        "  - path: demonstrations.jsonl",
        "    type: chat_template",
        "output_dir: out",
        "```",
        "",
        "- `a.b` is the key `b` in the block `a`: `trl.beta: 0.1` is `beta: 0.1` under `trl:`.",
        '- A key without a default is unset. Its meaning says what happens then, after "when left out" or "unset".',
        "- Unknown keys are errors, and the message names the nearest known key.",
        "- `make docs` writes this page from the help texts in the code.",
    ]
    for name, section in SECTIONS.items():
        lines += ["", f"## {summary_of(section).rstrip('.')}", "", *_table(section_rows(section))]
        if name == "data":
            lines += ["", "### Entries of `datasets` and `test_datasets`", "", *_table(_model_rows(DatasetSpec))]
            lines += ["", "### `type` as a mapping", "", *_table(_model_rows(UserFormat))]
        if name == "gym":
            lines += ["", "### Entries of `nemo_gym_datasets`", "", *_table(_model_rows(GymDataset))]
    lines += ["", "## Keys of the methods"]
    for name, method in METHODS.items():
        rate = f"{method.learning_rate:g}"
        rate += f" ({method.lora_learning_rate:g} with an adapter)" if method.lora_learning_rate else ""
        text = f"{summary_of(method)} Learning rate when left out: {rate}."
        rows = list(section_rows(method))
        table = _table(rows) if rows else ["This method adds no keys."]
        choice = how_to_choose(name)
        lines += ["", f"### {choice}" if "`" in choice else f"### `{choice}`", "", text, "", *table]
    return "\n".join([*lines, *_peers(), ""])


def summary_of(section: type[Section]) -> str:
    return (section.__doc__ or f"{section.__name__}.").splitlines()[0]


def section_rows(section: type[Section]) -> Iterator[tuple[str, str, str, str]]:
    for key in keys_of(section):
        if key.path == key.canonical:
            also = [alias.path for alias in keys_of(section) if alias.canonical == key.path != alias.path]
            path = f"`{key.path}`" + "".join(f", `{alias}`" for alias in also)
            yield (path, *_describe_field(key.field))


def _model_rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__):
        yield (f"`{name}`", *_describe_field(field))


def _describe_field(field: FieldInfo) -> tuple[str, str, str]:
    annotation = field.annotation
    kind = describe(annotation)
    if get_origin(annotation) is list and isinstance(get_args(annotation)[0], type):
        kind = {str: "a list of texts", int: "a list of whole numbers"}.get(get_args(annotation)[0], kind)
    default = "required" if field.is_required() else _show_default(field.get_default(call_default_factory=False))
    return kind.removeprefix("one of "), default, field.description or ""


def _show_default(value: Any) -> str:
    if value is None or value in ({}, [], ()) or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _table(rows: Any) -> list[str]:
    cells = [tuple(cell.replace("|", "\\|").replace("\n", "\\n") for cell in row) for row in rows]
    return ["| key | value | default | meaning |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]


def _peers() -> list[str]:
    lines = [
        "",
        "## Keys of other trainers",
        "",
        "Configs of Axolotl and other trainers may have these keys. This is what Upweight does with them.",
        "",
    ]
    lines += [
        "### Accepted without effect",
        "",
        "What these keys ask for always happens, or is not needed. Each line begins with the reason.",
    ]
    lines += [
        "",
        *_by_reason(NO_EFFECT),
        "",
        "### Renamed",
        "",
        "Both names are accepted.",
        "",
        "| old | new |",
        "|---|---|",
    ]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    lines += [f"| `{old}: true` | `attn_implementation: {new}` |" for old, new in ATTENTION_SWITCHES.items()]
    lines += ["| `fsdp_config.fsdp_*` | `fsdp_config.*` |"]
    lines += ["", "### Other names", "", "| other trainers | Upweight |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in OTHER_NAMES.items()]
    return [
        *lines,
        "",
        "### Refused",
        "",
        "A config with one of these keys stops with an error. Each line begins with the reason.",
        "",
        *_by_reason(REFUSED),
    ]


def _by_reason(listed: dict[str, list[str]]) -> list[str]:
    return [f"- {reason}: {', '.join(f'`{key}`' for key in keys)}" for reason, keys in listed.items()]
