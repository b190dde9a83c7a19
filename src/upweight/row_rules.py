"""Which rows are trained on, in which order, and at what length: keys, and the functions that do what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from upweight.errors import UserError
from upweight.lazy_imports import NDArray, np
from upweight.log import counted
from upweight.methods.base import Method
from upweight.settings import PositiveInt, Section, Strict, inner, setting
from upweight.types import IGNORED

Columns = dict[str, Any]  # of a prepared record: token ids and masks

if TYPE_CHECKING:
    Positions = NDArray[np.int64]  # of rows

# Columns that are cut at their end; prompts to complete have none, whatever the columns of their rows are named.
CUT_COLUMNS = ("chosen_ids", "rejected_ids", "completion_ids", "input_ids", "labels", "loss_mask")


class EntryRows(Strict):
    """The keys of an entry of `datasets` that select rows of it."""

    skip: int = inner(0, "Number of rows left out at the start.", ge=0)
    max_samples: PositiveInt | None = inner(None, "Number of rows to take at random; of a stream, the first ones.")
    shards: PositiveInt | None = inner(None, "Number of shards the rows are split into; one of them is kept.")
    shards_idx: int = inner(0, "Index of the shard that is kept.", ge=0)


class RowSection(Section):
    """The keys that select, order and shorten the rows of all entries."""

    val_set_size: float = setting("val_set_size", 0.0, "Share (below 1) or number of rows held out to evaluate.", ge=0)
    shard_count: PositiveInt | None = setting(
        "dataset_shard_num", None, "Split all data into this many shards and train on one of them."
    )
    shard_index: int = setting("dataset_shard_idx", 0, "Index of the shard that is kept.", ge=0)
    shuffle_merged: bool = setting("shuffle_merged_datasets", True, "Shuffle the rows after datasets are merged.")
    shuffle_before_merging: bool = setting("shuffle_before_merging_datasets", False, "Shuffle datasets before merging.")
    curriculum: bool = setting("curriculum_sampling", False, "Train on the rows in their order, without shuffling.")
    order_seed: int | None = setting(
        "data_seed", None, "Seed of the order of the rows that are trained on; when left out: `seed`.", ge=0, lt=2**32
    )
    sequence_len: PositiveInt = setting("sequence_len", 512, "Longest sequence in tokens, prompt included.")
    eval_sequence_len: PositiveInt | None = setting("eval_sequence_len", None, "Longest sequence in evaluation.")
    min_sample_len: int = setting("min_sample_len", 0, "Rows with fewer tokens are dropped.", ge=0)
    max_prompt_length: PositiveInt | None = setting(
        "max_prompt_length",
        None,
        "Longest prompt in tokens; longer ones are cut on the left.",
        also=("trl.max_prompt_length",),
    )
    too_long: Literal["drop", "truncate", "raise"] = setting(
        "excess_length_strategy", "drop", "What happens to a row that is too long."
    )


def select_from_entry(rules: EntryRows, count: int, seed: int, where: str = "datasets") -> Positions:
    """Return which of an entry's `count` rows are read, in order; `where` names the entry in errors."""
    if rules.skip >= count:
        raise UserError(f"{where}: 'skip: {rules.skip}' leaves out all of {counted(count, 'row')}.")
    rows = np.arange(rules.skip, count)
    if rules.shards:
        rows = rows[rules.shards_idx :: rules.shards]
    if rules.max_samples and rules.max_samples < len(rows):
        rows = rows[np.sort(np.random.default_rng(seed).permutation(len(rows))[: rules.max_samples])]
    return rows


def split_rows(rules: RowSection, counts: Sequence[int], seed: int) -> list[tuple[Positions, Positions]]:
    """Return, for entries with `counts` rows, which rows are trained on and which are held out to evaluate."""
    if not counts:
        return []
    # The shards are dealt over the rows of all entries.
    first, step = rules.shard_index, rules.shard_count or 1
    starts = [(first - before) % step for before in np.cumsum([0, *counts])[:-1]]
    kept = [np.arange(start, count, step) for start, count in zip(starts, counts, strict=True)]
    size, total = rules.val_set_size, sum(map(len, kept))
    number = min(max(round(size * total), 1), total) if 0 < size < 1 else int(size)
    if number and number >= total:
        raise UserError(
            f"val_set_size: {number} of {counted(total, 'row')} would be held out and none left to train on. "
            "Set it lower (0 holds none out), or add rows."
        )
    mask = np.zeros(total, bool)
    mask[np.random.default_rng(seed).permutation(total)[:number]] = True
    held_out = np.split(mask, np.cumsum([len(rows) for rows in kept])[:-1])
    return [(rows[~held], rows[held]) for rows, held in zip(kept, held_out, strict=True)]


def training_order(rules: RowSection, counts: Sequence[int], seed: int) -> Positions:
    """Return the order in which the prepared rows of entries, `counts` of each, are trained on."""
    random, order = np.random.default_rng(seed), np.arange(sum(counts))
    if rules.shuffle_before_merging and counts:
        order = np.concatenate([random.permutation(part) for part in np.split(order, np.cumsum(counts)[:-1])])
    return random.permutation(order) if rules.shuffle_merged and not rules.curriculum else order


def cut_columns(columns: Columns, method: Method) -> list[str]:
    """Return the names of a record's columns that are cut if it is too long."""
    only_prompts = method.data == "prompts" and not method.strided
    return [] if only_prompts else [name for name in CUT_COLUMNS if name in columns]


def lengths_of(columns: Columns, method: Method) -> tuple[int, int, int]:
    """Return the tokens of a record's prompt, longest completion (0 for prompts and steps) and longest sequence."""
    names = cut_columns(columns, method)
    if "input_ids" in names:
        size, trained = len(columns["input_ids"]), sum(columns.get("loss_mask", ()))
        return size - trained if trained else 0, trained, size
    prompt, completion = len(columns["prompt_ids"]), max((len(columns[name]) for name in names), default=0)
    return prompt, completion, prompt + completion


def _cuts_images(columns: Columns, room: int) -> bool:
    """Return whether a record cut to `room` tokens would lack some that stand for images."""
    tokens = {image["token_id"] for image in columns.get("images") or ()}
    return any(token in tokens for token in columns.get("input_ids", ())[room:])


def apply_length_rules(
    columns: Columns, rules: RowSection, method: Method, *, pinned: int = 0, evaluation: bool = False
) -> tuple[Columns | None, str | None]:
    """Return a record's columns, cut if the rules say so, or None if it is dropped; and the reason for any change."""
    names, limit, reason = cut_columns(columns, method), rules.max_prompt_length, None
    prompt = columns.get("prompt_ids", [])
    longest = (rules.eval_sequence_len if evaluation else None) or rules.sequence_len
    if limit is not None and len(prompt) > limit and columns.get("images"):
        return None, "prompt with images longer than max_prompt_length"
    if limit is not None and len(prompt) > limit:
        first = prompt[: min(pinned, limit - 1)]  # a BOS token stays
        prompt = first + prompt[len(prompt) - (limit - len(first)) :]
        columns, reason = columns | {"prompt_ids": prompt}, "prompt cut to max_prompt_length"
    size = lengths_of(columns, method)[-1]
    if size < rules.min_sample_len:
        return None, "shorter than min_sample_len"
    if size > longest and names:
        # A document of EBFT has no end that training needs: it is cut whatever the strategy.
        if rules.too_long == "drop" and not method.strided:
            return None, "longer than sequence_len"
        if rules.too_long == "raise" and not method.strided:
            rule = f"at most {longest} tokens (excess_length_strategy: raise)"
            raise UserError(f"'sequence_len': expected {rule}, got {size}")
        room = longest - len(prompt)
        if room < 1:
            return None, "prompt leaves no room for an answer within sequence_len"
        if _cuts_images(columns, room):
            return None, "longer than sequence_len, where it would be cut through an image or before one"
        columns, reason = columns | {name: columns[name][:room] for name in names}, "cut to sequence_len"
    unlabelled = "labels" in names and all(label == IGNORED for label in columns["labels"])
    if unlabelled or ("loss_mask" in names and not any(columns["loss_mask"])):
        return None, "nothing to train on within the limits of length"
    return columns, reason
