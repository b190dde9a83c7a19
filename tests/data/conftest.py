"""Preparing rows that a test writes."""

import json

import datasets
import pytest

from made_tokenizers import byte_tokenizer
from upweight.config import parse_config
from upweight.data.prepare import prepare

TOKENIZER = byte_tokenizer()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Writes rows to files and prepares them; the last config and result can be looked at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")

    def write(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def go(rows=None, *, tokenizer=TOKENIZER, **keys):
        if rows is not None:
            write(rows)
        chosen = {"base_model": "tiny", "rl": "dpo", "dataset_prepared_path": "prepared"}
        chosen["datasets"] = [{"path": "rows.jsonl", "type": "chatml.prompt_pairs"}]
        go.config = parse_config({**chosen, **keys}, folder=tmp_path)
        return prepare(go.config, tokenizer)

    go.write, go.folder = write, tmp_path
    return go
