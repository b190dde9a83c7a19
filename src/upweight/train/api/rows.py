"""A script's rows -> prepared rows, by the same encoders as a config's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from upweight.config import ConfigView
from upweight.config.sections.data import DataSection, DatasetRow
from upweight.data.chunks import Job, encode_all, schema_of, with_columns
from upweight.data.encode import build_encoder
from upweight.data.sources.open import RowSelection, Table
from upweight.errors import UserError
from upweight.log import logger
from upweight.methods.base import Method
from upweight.train.api.configs import MethodArguments, PRMConfig, SFTConfig
from upweight.train.api.grpo_config import RolloutArguments

UNLIMITED = 2**31 - 1


def as_dataset(rows: Any, where: str) -> Dataset:
    """Rows as a Dataset, if they are one or a list of mappings."""
    if isinstance(rows, Dataset):
        return rows
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise UserError(f"{where}: expected a datasets.Dataset or a list of rows, got {type(rows).__name__}.")
    try:
        return Dataset.from_list([dict(row) for row in rows])
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"{where}: the rows differ in what their columns hold: {error}") from error


def prepare_rows(
    rows: Dataset,
    args: MethodArguments,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    classes: int | None = None,
) -> Dataset:
    """Rows as text or messages -> token ids; what was dropped or cut is logged, a bad row is an error.

    `classes`: outputs of the score head, below which labels have to be.
    """
    online = isinstance(args, RolloutArguments)
    columns = set(rows.column_names)
    data = DataSection(
        sequence_len=args.max_length or UNLIMITED,
        too_long=args.too_long,
        processes=args.dataset_num_proc,
        train_on_inputs=isinstance(args, SFTConfig) and _trains_on_inputs(args, columns, where),
        max_prompt_length=args.max_prompt_length if online else None,
        template_args=(args.chat_template_kwargs or {}) if online else {},
    )
    entry = _entry(args, columns)
    encoder = build_encoder(data, method, entry, 0, tokenizer, ConfigView({}), Path(), classes)
    job = Job(where, False, RowSelection.of(Table(rows), np.arange(len(rows))), encoder, data, method)
    batches, names, changed = [], set[str](), Counter[str]()
    for _, _, chunk in encode_all([job], processes=data.processes, digests=False):
        batches.append(chunk.batch)
        names |= chunk.names
        changed += chunk.dropped + chunk.notes
    for reason, count in changed.items():
        logger.warning("%s: %d of %d rows: %s", where, count, len(rows), reason.replace("sequence_len", "max_length"))
    prepared = Dataset(pa.Table.from_batches(batches, pa.schema(list(schema_of(method).items()))))
    if not len(prepared):
        raise UserError(f"{where}: no rows are left to train on.")
    return with_columns(prepared, names)


def longest(*prepared: Dataset | None) -> int:
    """Tokens of the longest sequence in prepared rows."""
    lengths = [0]
    for rows in prepared:
        if rows is None:
            continue
        sizes = {name: _lengths(rows, name) for name in rows.column_names if name == "ids" or name.endswith("_ids")}
        prompt = sizes.pop("prompt_ids", 0)
        lengths += [int((prompt + size).max()) for size in sizes.values() or [0]]
    return max(lengths)


def _lengths(rows: Dataset, name: str) -> Any:
    return pc.call_function("list_value_length", [rows.data.column(name)]).to_numpy()


def _entry(args: MethodArguments, columns: set[str]) -> DatasetRow:
    if isinstance(args, PRMConfig):
        return DatasetRow(
            step_separator=args.step_separator,
            train_on_last_step_only=args.train_on_last_step_only,
            max_completion_length=args.max_completion_length,
        )
    if not isinstance(args, SFTConfig):
        return DatasetRow()
    roles = ["assistant"] if args.assistant_only_loss and "input_ids" not in columns else None
    return DatasetRow(field=args.dataset_text_field, roles_to_train=roles)


def _trains_on_inputs(args: SFTConfig, columns: set[str], where: str) -> bool:
    """Whether prompts are trained on too: unless asked, no for completions, yes for conversations and token ids."""
    tokenised = "input_ids" in columns
    completions = {"completion_mask", "labels"} & columns if tokenised else {"prompt", "completion"} <= columns
    turns = "assistant_masks" in columns if tokenised else completions or {"messages", "conversations"} & columns
    if args.assistant_only_loss and not turns:
        raise UserError(
            f"assistant_only_loss: the rows of {where} need messages, in a column 'messages' or in 'prompt' and "
            "'completion', or token ids with 'assistant_masks'."
        )
    if args.completion_only_loss and not completions:
        raise UserError(
            f"completion_only_loss: the rows of {where} need the columns 'prompt' and 'completion', or token ids with "
            "'completion_mask'."
        )
    if tokenised:
        return not args.completion_only_loss
    return args.completion_only_loss is False if completions else not args.assistant_only_loss
