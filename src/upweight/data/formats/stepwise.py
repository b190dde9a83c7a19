"""The format for process reward models: completions in steps, each with a label."""

from upweight.data.examples import Example, Format, Setup, Steps, Tokens
from upweight.data.raw_row import Row, RowError, checked_text, describe_value
from upweight.types import IGNORED

MOST_CLASSES = 1000  # if num_labels is not known


def stepwise(setup: Setup, row: Row) -> list[Example]:
    """Read `prompt`, `completions` and `labels` (a text and a class for each step), or `input_ids` with `labels`."""
    count = setup.classes or MOST_CLASSES
    if row.has("input_ids"):
        if setup.entry.train_on_last_step_only or setup.entry.max_completion_length:
            settings = "train_on_last_step_only and max_completion_length"
            raise RowError("completions", f"steps as text, which {settings} need, got token ids")
        ids = row.token_ids("input_ids")
        labels = [label if label == IGNORED else _class(label, "labels", count) for label in row.token_labels(len(ids))]
        return [Tokens({"input_ids": ids, "labels": labels})]
    steps, labels = row.list_at("completions", "steps"), row.list_at("labels", "labels")
    if len(steps) != len(labels):
        raise RowError("labels", f"one label for each of the {len(steps)} steps, got {len(labels)}")
    texts = [checked_text(step, f"completions[{number}]") for number, step in enumerate(steps)]
    classes = [_class(label, f"labels[{number}]", count) for number, label in enumerate(labels)]
    return [Steps(row.text("prompt"), texts, classes)]


def _class(label: object, key: str, classes: int) -> int:
    if isinstance(label, bool | int | float) and 0 <= label < classes and label == int(label):
        return int(label)
    raise RowError(key, f"true, false or a class number below {classes} (num_labels), got {describe_value(label)}")


FORMATS: dict[str, Format] = {"stepwise_supervised": stepwise, "stepwise_supervised.default": stepwise}
