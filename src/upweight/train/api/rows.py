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
from upweight.train.api.grpo_config import GRPOConfig

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
    online = isinstance(args, GRPOConfig)
    data = DataSection(
        sequence_len=args.max_length or UNLIMITED,
        too_long=args.too_long,
        processes=args.dataset_num_proc,
        train_on_inputs=isinstance(args, SFTConfig) and _trains_on_inputs(args, rows.column_names, where),
        max_prompt_length=args.max_prompt_length if online else None,
        template_args=(args.chat_template_kwargs or {}) if online else {},
    )
    entry = _entry(args)
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


def _entry(args: MethodArguments) -> DatasetRow:
    if isinstance(args, PRMConfig):
        return DatasetRow(
            step_separator=args.step_separator,
            train_on_last_step_only=args.train_on_last_step_only,
            max_completion_length=args.max_completion_length,
        )
    return DatasetRow(field=args.dataset_text_field) if isinstance(args, SFTConfig) else DatasetRow()


def _trains_on_inputs(args: SFTConfig, columns: Sequence[str], where: str) -> bool:
    """Whether prompts are trained on too: unless asked, no for completions, yes for conversations."""
    if "prompt" in columns and "completion" in columns:
        return args.completion_only_loss is False
    if args.completion_only_loss:
        raise UserError(f"completion_only_loss: the rows of {where} need the columns 'prompt' and 'completion'.")
    conversational = "messages" in columns or "conversations" in columns
    if args.assistant_only_loss and not conversational:
        raise UserError(f"assistant_only_loss: the rows of {where} need a column 'messages'.")
    return not args.assistant_only_loss
