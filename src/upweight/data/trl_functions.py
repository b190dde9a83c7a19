"""Functions that scripts call on rows and datasets before training: templates, prompts, pairs, packing."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from datasets import Dataset, DatasetDict

from upweight.data.raw_row import common_length
from upweight.errors import UserError

MESSAGE_COLUMNS = ("prompt", "completion", "chosen", "rejected", "messages")
COLUMN_SETS = (
    {"messages"}, {"prompt"}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"}, {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)  # fmt: skip
STRATEGIES = ("bfd", "bfd_split", "wrapped")


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Return whether a row holds messages (with a `role`) rather than plain text."""
    return _holds_messages(next((example[name] for name in MESSAGE_COLUMNS if name in example), None), "role")


def is_conversational_from_value(example: Mapping[str, Any]) -> bool:
    """Return whether a row holds messages as `from` and `value`, under `conversations`."""
    return _holds_messages(example.get("conversations"), "from", "value")


def _holds_messages(value: Any, *keys: str) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and set(keys) <= set(value[0])


def maybe_convert_to_chatml(example: dict[str, Any]) -> dict[str, Any]:
    """Return the row with `from`, `value` and `conversations` renamed to `role`, `content` and `messages`."""
    names = {"from": "role", "value": "content"}

    def renamed(message: Any) -> Any:
        is_message = isinstance(message, Mapping)
        return {names.get(key, key): value for key, value in message.items()} if is_message else message

    row = dict(example)
    for name in (*MESSAGE_COLUMNS, "conversations"):
        if isinstance(row.get(name), list):
            row[name] = [renamed(message) for message in row[name]]
    if "conversations" in row:
        row["messages"] = row.pop("conversations")
    return row


def apply_chat_template(
    example: dict[str, Any], processing_class: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Render a row of messages as text; `messages` becomes `text`, completions are the text after the prompt."""
    columns = {name for name in (*MESSAGE_COLUMNS, "label") if name in example}
    if columns not in COLUMN_SETS:
        raise KeyError(f"a row with the columns {sorted(columns)} has no chat template; there are {list(COLUMN_SETS)}")
    options = {"tools": tools or None, "tokenize": False}
    options |= {**(example.get("chat_template_kwargs") or {}), **template_kwargs}

    def text_of(messages: Any, **more: Any) -> str:
        return processing_class.apply_chat_template(messages, **options, **more)

    if "messages" in example:
        return {"text": text_of(example["messages"])}
    answers = [name for name in ("chosen", "rejected", "completion") if name in example]
    if "prompt" not in example:
        return {name: text_of(example[name]) for name in answers}
    role = example["prompt"][-1]["role"]
    if role not in ("user", "tool", "assistant"):
        problem = f"its last message has the role {role!r}, which no completion can follow"
        raise UserError(f"prompt: {problem}. End it with a user turn.")
    resumes = role == "assistant"
    prompt = text_of(example["prompt"], add_generation_prompt=not resumes, continue_final_message=resumes)
    whole = {name: text_of(example["prompt"] + example[name]) for name in answers}
    # A template may end a prompt in text that a completion does not begin with, such as an opened thought.
    for text in whole.values():
        prompt = prompt[: common_length(prompt, text)]
    kept = {"label": example["label"]} if "label" in example else {}
    return {"prompt": prompt, **{name: text[len(prompt) :] for name, text in whole.items()}, **kept}


def maybe_apply_chat_template(
    example: dict[str, Any], processing_class: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Apply the chat template to a row that holds messages; return any other row unchanged."""
    conversational = is_conversational(example)
    return apply_chat_template(example, processing_class, tools, **template_kwargs) if conversational else example


def extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Split the common prefix of `chosen` and `rejected` off as the `prompt`."""
    chosen, rejected = example["chosen"], example["rejected"]
    most, shared = min(len(chosen), len(rejected)), common_length(chosen, rejected)
    if shared == most:
        shared = max(most - 1, 0)  # neither completion may become empty
    elif shared and chosen[shared - 1] == " ":
        shared -= 1  # words are tokens together with the space before them
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def maybe_extract_prompt(example: dict[str, Any]) -> dict[str, Any]:
    """Extract the prompt of a pair that has none of its kind; return any other row unchanged."""
    if "chosen" not in example or "rejected" not in example:
        return example
    conversational = is_conversational({"chosen": example["chosen"]})
    if "prompt" in example and is_conversational({"prompt": example["prompt"]}) == conversational:
        return example
    return extract_prompt(example)


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Turn pairs into completions with a `label`: the chosen ones of a batch of rows, then the rejected ones."""

    def unpaired(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        kept = {name: values + values for name, values in batch.items() if name not in ("chosen", "rejected")}
        labels = [True] * len(batch["chosen"]) + [False] * len(batch["rejected"])
        return kept | {"completion": batch["chosen"] + batch["rejected"], "label": labels}

    return dataset.map(unpaired, batched=True, remove_columns=_column_names(dataset), **map_kwargs)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Unpair a dataset of pairs; return any other dataset unchanged."""
    is_paired = {"chosen", "rejected"} <= set(_column_names(dataset))
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc) if is_paired else dataset


def truncate_dataset(dataset: Any, max_length: int, map_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Cut every list of every row to `max_length`."""

    def shortened(value: Any) -> Any:
        return value[:max_length] if isinstance(value, list) else value

    def cut(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: list(map(shortened, values)) for name, values in batch.items()}

    return _map_batches(dataset, cut, map_kwargs)


def pack_dataset(
    dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Pack rows of token lists into rows of up to `seq_length` tokens; `seq_lengths` holds the packed lengths.

    `bfd` truncates rows to `seq_length` and packs them by best fit; `bfd_split` packs the rest of a long row as another
    row; `wrapped` cuts one stream of tokens wherever a row is full. Trainers here pack by themselves.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"strategy: {strategy!r} is none of {', '.join(STRATEGIES)}.")

    def packed(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        lengths = [[len(value) if isinstance(value, list) else -1 for value in values] for values in batch.values()]
        if any(-1 in column for column in lengths):
            raise TypeError("pack_dataset: every column has to hold lists of tokens; remove the others first")
        if any(column != lengths[0] for column in lengths):
            raise UserError("pack_dataset: the columns of a row differ in length.")
        if strategy == "wrapped":
            return {name: _chunks(list(chain.from_iterable(values)), seq_length) for name, values in batch.items()}
        most = None if strategy == "bfd_split" else 1  # `bfd` keeps the first chunk of a row
        sizes = [len(part) for length in lengths[0] for part in _chunks(range(length), seq_length)[:most]]
        bins = _best_fit(sizes, seq_length)
        joined = {"seq_lengths": [[sizes[at] for at in indices] for indices in bins]}
        for name, values in batch.items():
            parts = [part for value in values for part in _chunks(value, seq_length)[:most]]
            joined[name] = [list(chain.from_iterable(parts[at] for at in indices)) for indices in bins]
        return joined

    return _map_batches(dataset, packed, map_kwargs, added=() if strategy == "wrapped" else ("seq_lengths",))


def _map_batches(dataset: Any, change: Any, map_kwargs: Mapping[str, Any] | None, added: Sequence[str] = ()) -> Any:
    """Map a dataset in batches of plain lists, and restore its format."""
    if isinstance(dataset, DatasetDict):
        return DatasetDict({name: _map_batches(part, change, map_kwargs, added) for name, part in dataset.items()})
    changed = dataset.with_format(None).map(change, batched=True, **(map_kwargs or {}))
    if not isinstance(dataset, Dataset) or dataset.format["type"] is None:
        return changed
    view = dataset.format
    return changed.with_format(view["type"], columns=[*view["columns"], *added], **view["format_kwargs"])


def _column_names(dataset: Any) -> list[str]:
    if isinstance(dataset, Mapping):
        return _column_names(next(iter(dataset.values())))
    return dataset.column_names or list(next(iter(dataset)))


def _chunks(values: Sequence[Any], size: int) -> list[Any]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _best_fit(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return bins of row numbers by best fit decreasing: each row goes to the bin with the least sufficient room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int, list[int]]] = []  # free size of a bin, number of the row that left it, the bin; sorted
    for number, index in enumerate(sorted(range(len(sizes)), key=lambda at: -sizes[at])):
        fitting = bisect_left(rooms, sizes[index], key=lambda room: room[0])
        if fitting < len(rooms):
            room, _, chosen = rooms.pop(fitting)
        else:
            room, chosen = limit, []
            bins.append(chosen)
        chosen.append(index)
        if room > sizes[index]:
            insort(rooms, (room - sizes[index], number, chosen))
    return bins
