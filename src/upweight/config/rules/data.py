"""Rules about data: sources, shards, evaluation splits, formats and chat templates."""

import re
from collections.abc import Iterator

from upweight.config.config import Config, how_to_choose
from upweight.config.peers import FORMAT_NAMES
from upweight.config.sections.data import FALLBACK_PREFIX, KNOWN_TEMPLATES, DataSection, DatasetSpec, UserFormat
from upweight.errors import closest, did_you_mean
from upweight.methods import METHODS
from upweight.user_modules import local_file

FAMILIES = {name.partition(".")[0] for names in FORMAT_NAMES.values() for name in names}
SPLIT = re.compile(r"[\w.-]+(\[[^\[\]:]*:[^\[\]:]*\])?(\(\w+\))?")  # as `datasets` reads it
ROLES = ("assistant", "user", "system", "tool", "developer", "human", "gpt", "model", "function")  # usual ones
CHAT_KINDS = ("pairs", "labelled", "text", "prompts")  # formats whose plain texts can be made turns


def sources(config: Config) -> Iterator[str]:
    """Check data sources, shards, the evaluation split and chat templates."""
    section = config.data
    if section.val_set_size > 1 and section.val_set_size != int(section.val_set_size):
        yield f"val_set_size: a share below 1, or a whole number of rows, not {section.val_set_size:g}."
    if section.shard_count and section.shard_index >= section.shard_count:
        yield f"dataset_shard_idx: must be below dataset_shard_num ({section.shard_count})."
    if section.contamination and not section.test_datasets and not section.val_set_size:
        yield "dataset_contamination_check: there are no evaluation rows. Set 'test_datasets' or 'val_set_size'."
    yield from _check_template("", section)
    for key, row in entries(config):
        if row.path is None and row.data_files is None:
            yield f"{key}: names no data. Set 'path' or 'data_files'."
        if row.split and not all(SPLIT.fullmatch(part.strip()) for part in row.split.split("+")):
            yield f"{key}.split: '{row.split}' is no split. Slices are written 'train[:10%]' or 'train[5:50]'."
        if row.filter and "." not in row.filter.strip("."):
            yield f"{key}.filter: there is no '{row.filter}'. Name a function as 'file.function'."
        if row.shards and row.shards_idx >= row.shards:
            yield f"{key}.shards_idx: must be below shards ({row.shards})."
        if row.as_messages and (isinstance(row.type, str) or config.method.formats() not in CHAT_KINDS):
            problem = "is for rows without a 'type', or with a mapping of columns, of prompts and answers"
            yield f"{key}.as_messages: {problem}. Remove it."
        for role in row.roles_to_train or ():
            if role.lower() not in ROLES and (meant := closest(role, ROLES, 0.8)):
                yield f"{key}.roles_to_train: '{role}' is no usual role. Did you mean '{meant}'?"
        yield from _check_template(f"{key}.", row)


def entries(config: Config) -> Iterator[tuple[str, DatasetSpec]]:
    """Yield the YAML path and the entry of every training and evaluation dataset."""
    for key, rows in (("datasets", config.data.datasets), ("test_datasets", config.data.test_datasets)):
        for number, row in enumerate(rows):
            yield f"{key}[{number}]", row


def _check_template(key: str, section: DataSection | DatasetSpec) -> Iterator[str]:
    chosen = "tokenizer_default" if section.chat_template is None else section.chat_template
    plain = chosen.removeprefix(FALLBACK_PREFIX)
    if plain == "jinja" and not section.chat_template_jinja:
        yield f"{key}chat_template_jinja: missing. 'chat_template: jinja' needs the template's text or file."
    if plain not in KNOWN_TEMPLATES:
        near = did_you_mean(plain, KNOWN_TEMPLATES, 0.75)
        yield f"{key}chat_template: there is no '{plain}'.{near} Use 'tokenizer_default', or 'jinja' for yours."


def formats_are_known(config: Config) -> Iterator[str]:
    """Check the `type` of each entry, unless it names a user's function."""
    name, names = how_to_choose(config.method.name), FORMAT_NAMES[config.method.formats()]
    for key, row in entries(config):
        if isinstance(row.type, UserFormat) and "user_defined" not in names:
            yield f"{key}.type: a mapping of columns does not serve {name}. Name a format."
        if isinstance(row.type, UserFormat):
            yield from _check_marks(f"{key}.type", row.type, config.method.formats(), name)
        if not isinstance(row.type, str) or row.type in names:
            continue
        if others := [how_to_choose(n) for n, method in METHODS.items() if row.type in FORMAT_NAMES[method.formats()]]:
            problem = f"'{row.type}' is for {', '.join(others)}, not for {name}."
            yield f"{key}.type: {problem} Known here: {', '.join(names)}."
        elif row.type.partition(".")[0] in FAMILIES and local_file(row.type, config.folder) is None:
            yield f"{key}.type: there is no format '{row.type}'.{did_you_mean(row.type, names)}"
        elif "." not in row.type:
            problem = f"there is no format '{row.type}' here.{did_you_mean(row.type, names)}"
            yield f"{key}.type: {problem} Known: {', '.join(names)}. Name your function as file.function."


def _check_marks(key: str, form: UserFormat, kind: str, name: str) -> Iterator[str]:
    """Check what the words of labels and of winners stand for."""
    for one in ("label_values", "label_from"):
        if getattr(form, one) not in ({}, None) and kind != "labelled":
            yield f"{key}.{one}: is for labels of kto, and {name} reads none. Remove it."
    if form.label_values and form.label_from is not None:
        yield f"{key}.label_from: 'label_values' says which rows are good. Remove one of them."
    if not (form.field_winner or form.winner_values):
        return
    answers = {column for column in form.winner_values.values() if column is not None}
    if kind not in ("pairs", "labelled"):
        yield f"{key}.field_winner: is for pairs, and {name} reads none. Remove it, and winner_values."
    elif form.field_winner is None:
        yield f"{key}.field_winner: missing. 'winner_values' needs the column that says which answer is better."
    elif len(answers) != 2:
        named = ", ".join(map(repr, sorted(answers))) or "none"
        problem = f"must name the columns of two answers, and names {named}"
        yield f"{key}.winner_values: {problem}. Write them as in {{A: answer_a, B: answer_b, tie: null}}."
    elif wrong := [name for name in ("field_chosen", "field_rejected") if _is_changed(form, name)]:
        yield f"{key}.{wrong[0]}: 'winner_values' says which answer is chosen. Remove one of them."


def _is_changed(form: UserFormat, name: str) -> bool:
    """Return whether a field has another value than its default, which the config of a run writes out."""
    return getattr(form, name) != UserFormat.model_fields[name].default
