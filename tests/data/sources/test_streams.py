import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, IterableDataset, load_dataset
from datasets.distributed import split_dataset_by_node

from upweight.data.sources.streams import FileStream, IterableStream
from upweight.errors import UserError

ROWS = [{"text": f"row {number} {'x' * (number % 7)}"} for number in range(700)]


def rows_of(chunks):
    return [row for chunk, _ in chunks for row in chunk.take(0, len(chunk))]


def continues_anywhere(stream, expected):
    """A stream goes on after each of its chunks, from the position that a checkpoint would hold."""
    chunks = list(stream.chunks(None, 0))
    assert rows_of(chunks) == expected
    for number, (_, position) in enumerate(chunks):
        assert rows_of(stream.chunks(json.loads(json.dumps(position)), 0)) == rows_of(chunks[number + 1 :])
    assert len(chunks) > 2


def write_lines(file):
    file.write("".join(json.dumps(row) + "\n\n" for row in ROWS).encode())


def write_file(folder, name):
    file = folder / name
    if name == "a.jsonl":
        with file.open("wb") as lines:
            write_lines(lines)
    elif name.endswith(".gz"):
        with gzip.open(file, "wb") as lines:
            write_lines(lines)
    elif name.endswith(".zst"):
        with pa.output_stream(str(file), compression="zstd") as lines:
            write_lines(lines)
    elif name == "a.parquet":
        Dataset.from_list(ROWS).to_parquet(file, batch_size=300)
    elif name == "a.csv":
        file.write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in ROWS))
    elif name == "a.txt":
        file.write_text("".join(f"{row['text']}\n" for row in ROWS))
    else:
        table, make = pa.Table.from_pylist(ROWS), pa.ipc.new_file if name == "file.arrow" else pa.ipc.new_stream
        with pa.OSFile(str(file), "wb") as target, make(target, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    return file


@pytest.mark.parametrize(
    ("name", "kind", "place"),
    [
        ("a.jsonl", "json", "row 3 (a.jsonl:7)"),
        ("a.jsonl.gz", "json", "row 3 (a.jsonl.gz:7)"),
        ("a.jsonl.zst", "json", "row 3 (a.jsonl.zst:7)"),
        ("a.parquet", "parquet", "row 3 (a.parquet)"),
        ("stream.arrow", "arrow", "row 3 (stream.arrow)"),
        ("file.arrow", "arrow", "row 3 (file.arrow)"),
        ("a.csv", "csv", "row 3 (a.csv)"),
        ("a.txt", "text", "row 3 (a.txt:4)"),
    ],
)
def test_files_continue_where_they_were_read_to(name, kind, place, tmp_path):
    file = write_file(tmp_path, name)
    stream = FileStream([file, file], [kind, kind])
    continues_anywhere(stream, [*ROWS, *ROWS])
    assert next(stream.chunks(None, 0))[0].location(3) == place
    assert stream.count() == (2 * len(ROWS) if kind == "parquet" else None)


def test_a_parquet_file_of_one_row_group_is_not_held_as_a_whole(tmp_path):
    rows, file = (
        pa.table({"text": [f"{number:08} " + "abcdefgh" * 120 for number in range(20_000)]}),
        tmp_path / "a.parquet",
    )
    pyarrow.parquet.write_table(rows, file, compression="none", use_dictionary=False)
    before, most, read = pa.total_allocated_bytes(), 0, 0
    for chunk, _ in FileStream([file], ["parquet"]).chunks(None, 0):
        most, read = max(most, pa.total_allocated_bytes() - before), read + len(chunk)
    assert read == len(rows)
    assert rows.nbytes > 16 << 20 > 4 * most


def test_iterable_datasets_continue_by_their_state(tmp_path):
    file = write_file(tmp_path, "a.jsonl")
    made = IterableDataset.from_generator(lambda: iter(ROWS))
    continues_anywhere(IterableStream(made), ROWS)
    continues_anywhere(IterableStream(Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)), ROWS)
    loaded = load_dataset("json", data_files=str(file), split="train", streaming=True)
    continues_anywhere(IterableStream(loaded), ROWS)
    changed = made.map(lambda row: {"size": len(row["text"])}).filter(lambda row: row["size"] != 6)
    continues_anywhere(IterableStream(changed), list(changed))


def test_rows_that_cannot_be_read_name_their_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": b}\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: not JSON"):
        rows_of(FileStream([file], ["json"]).chunks(None, 0))
    file.write_text('[{"text": "a"}]')
    with pytest.raises(UserError, match=r"one JSON list.*Write one object on each line"):
        list(FileStream([file], ["json"]).chunks(None, 0))
    damaged = tmp_path / "a.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "a"}\n' * 9000)[:50])
    with pytest.raises(UserError, match=r"a.jsonl.gz: cannot be read"):
        list(FileStream([damaged], ["json"]).chunks(None, 0))

    def fails():
        yield ROWS[0]
        raise ValueError("the disk is gone")

    with pytest.raises(UserError, match=r"after row 1: .*the disk is gone"):
        list(IterableStream(IterableDataset.from_generator(fails)).chunks(None, 0))


def test_streams_that_were_divided_over_ranks_are_refused():
    divided = split_dataset_by_node(Dataset.from_list(ROWS).to_iterable_dataset(), 0, 2)
    with pytest.raises(UserError, match="undivided"):
        IterableStream(divided)
