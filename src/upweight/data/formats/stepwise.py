"""Answers in steps with a verdict on each: for process reward models."""

from upweight.data.examples import Example, Format, Setup, Steps
from upweight.data.raw_row import Row, RowError, checked_list, checked_text, found, lookup, text_at

MOST_CLASSES = 1000  # where nobody says how many there are


def stepwise(setup: Setup, row: Row) -> list[Example]:
    """`prompt`, `completions` (one text a step) and `labels` (one class a step)."""
    count = setup.classes or MOST_CLASSES
    steps = checked_list(lookup(row, "completions"), "completions", "steps")
    labels = checked_list(lookup(row, "labels"), "labels", "labels")
    if len(steps) != len(labels):
        raise RowError("labels", f"one label for each of the {len(steps)} steps, found {len(labels)}")
    texts = [checked_text(step, f"completions[{number}]") for number, step in enumerate(steps)]
    classes = [_class(label, f"labels[{number}]", count) for number, label in enumerate(labels)]
    return [Steps(text_at(row, "prompt"), texts, classes)]


def _class(label: object, key: str, classes: int) -> int:
    if isinstance(label, bool | int | float) and 0 <= label < classes and label == int(label):
        return int(label)
    raise RowError(key, f"true, false or a class number below {classes} (num_labels), found {found(label)}")


FORMATS: dict[str, Format] = {"stepwise_supervised": stepwise, "stepwise_supervised.default": stepwise}
