"""Prompts outside of training, written as the dataset's `type` wrote them for training where no chat template did."""

from collections.abc import Callable
from dataclasses import dataclass

from upweight.config.sections.data import UserFormat
from upweight.data.examples import Setup
from upweight.data.formats.markup import PLACEHOLDER, prompt_of_form
from upweight.data.formats.prompt_styles import STYLES
from upweight.data.formats.sft import instruction_prompt
from upweight.data.raw_row import Row, RowError


@dataclass(frozen=True)
class TrainingStyle:
    """How a dataset wrote prompts: its name for messages, the columns it needs, and what writes one."""

    name: str
    columns: tuple[str, ...]
    write: Callable[[Row], str]

    def __call__(self, row: Row) -> str:
        """Return the text of a row; its `prompt` is taken for the one column that it lacks."""
        missing = [column for column in self.columns if not row.has(column)]
        if len(missing) > 1 and "prompt" in row:
            style = f"the columns {' and '.join(missing)}, which prompts in the style of {self.name} are made of"
            raise RowError("prompt", f"{style} (rows of --file have them; --no-style writes none)")
        if missing and isinstance(row.get("prompt"), str):
            row = Row({**row, missing[0]: row["prompt"]})
        return self.write(row)


def style_of(setup: Setup) -> TrainingStyle | None:
    """Return the style of a dataset's prompts; None where a chat template may have written them."""
    kind, form, formats = setup.entry.type, setup.form, setup.method.formats()
    if setup.entry.as_messages:
        return None
    if setup.entry.as_messages is False and kind is None:
        return TrainingStyle("plain text", ("prompt",), lambda row: row.text("prompt"))
    if formats == "text" and (kind == "alpaca" or isinstance(kind, UserFormat)):
        name = "a mapping of columns" if isinstance(kind, UserFormat) else f"`type: {kind}`"
        return TrainingStyle(name, (form.field_instruction,), lambda row: instruction_prompt(setup, row))
    if isinstance(kind, UserFormat) and formats in ("pairs", "labelled", "prompts"):
        return TrainingStyle("a mapping of columns", (form.field_prompt,), lambda row: prompt_of_form(setup, row))
    if formats != "text" or not isinstance(kind, str) or kind not in STYLES:
        return None
    style = STYLES[kind]
    needed = tuple(dict.fromkeys(PLACEHOLDER.findall(style.prompts[-1])))
    return TrainingStyle(f"`type: {kind}`", needed, style.prompt)
