"""The hash of prepared rows: their content and order, not how they are stored."""

import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets

from upweight.data.cache import rows_digest

ROWS = [{"ids": list(range(n % 7)), "text": f"row {n}" if n % 3 else None, "label": n % 2 == 0} for n in range(50)]


def test_the_same_rows_in_other_pieces_have_the_same_hash():
    whole = Dataset.from_list(ROWS)
    pieces = concatenate_datasets([whole.select(range(20)), Dataset.from_list(ROWS[20:])])
    columns = whole.select_columns(["text", "label", "ids"])
    assert rows_digest(whole) == rows_digest(pieces) == rows_digest(columns) == rows_digest(whole.flatten_indices())


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:-1],
        [ROWS[1], ROWS[0], *ROWS[2:]],
        [*ROWS[:-1], {**ROWS[-1], "ids": [0]}],
        [{**ROWS[0], "text": ""}, *ROWS[1:]],
    ],
    ids=["shorter", "order", "token", "empty for none"],
)
def test_other_rows_have_another(rows):
    assert rows_digest(Dataset.from_list(rows)) != rows_digest(Dataset.from_list(ROWS))


def test_columns_count_under_the_names_that_digests_in_checkpoints_have():
    old = {"ids": [1, 2], "prompt_length": 1, "scored": [False, True]}
    new = {"input_ids": [1, 2], "prompt_length": 1, "loss_mask": [False, True]}
    old, new = (Dataset(pa.Table.from_pylist([row])) for row in (old, new))  # with the types of prepared rows
    assert rows_digest(old) == rows_digest(new)
