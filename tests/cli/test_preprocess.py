"""`upweight preprocess` as a person runs it: the summary on stderr, rows on stdout."""

import json

import pytest

from made_runs import upweight
from made_tokenizers import byte_tokenizer

CONFIG = """
base_model: model
rl: dpo
sequence_len: 256
shuffle_merged_datasets: false
datasets:
  - path: rows.jsonl
    type: chatml.prompt_pairs
"""
ROWS = [{"prompt": f"why {number}?", "chosen": "because é", "rejected": "no"} for number in range(3)]


@pytest.fixture
def preprocess(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))

    return lambda *arguments, **environment: upweight(
        "preprocess", "config.yaml", *arguments, folder=tmp_path, **environment
    )


def test_fills_the_cache_and_sums_up(preprocess, tmp_path):
    done = preprocess()
    assert (done.returncode, done.stdout) == (0, "")
    assert "datasets[0] (rows.jsonl): 3 rows read, 3 kept" in done.stderr
    assert "suggested sequence_len: 64 keeps all (now 256: 100.0% of rows fit)" in done.stderr
    assert "`--show 3` prints rows" in done.stderr
    assert len(list((tmp_path / "last_run_prepared").iterdir())) == 1


def test_shows_rows_and_nothing_else(preprocess):
    done = preprocess("--show", "2")
    assert "--show" not in done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert shown == [
        {
            "prompt": f"<|im_start|>user\nwhy {number}?<|im_end|>\n<|im_start|>assistant\n",
            "chosen": "because é<|im_end|>",
            "rejected": "no<|im_end|>",
        }
        for number in range(2)
    ]
    done = preprocess("--show", "9", "--tokens")
    assert "from the cache" in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    assert set(rows[0]) == {"prompt", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids"}


def test_a_cut_answer_is_shown_as_it_was_cut(preprocess):
    whole = json.loads(preprocess("--show", "1", "--tokens").stdout)
    room = len(whole["prompt_ids"]) + 4
    arguments = ("excess_length_strategy=truncate", f"sequence_len={room}")
    row = json.loads(preprocess("--show", "1", "--tokens", *arguments).stdout)
    assert (row["chosen"], row["chosen_ids"]) == ("beca", whole["chosen_ids"][:4])
    assert row["rejected"] == whole["rejected"]


def test_the_loss_mask_is_shown(preprocess, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"instruction": "Add.", "output": "4"}))
    (tmp_path / "config.yaml").write_text(
        "base_model: model\ndatasets: [{path: texts.jsonl, type: alpaca}]\nsequence_len: 512\n"
    )
    row = json.loads(preprocess("--show", "1", "--tokens").stdout)
    assert len(row["input_ids"]) == len(row["loss_mask"])
    assert sum(row["loss_mask"]) == 2


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ('{"prompt": "a", "chosen": 4}', (), "datasets[0] (rows.jsonl), row 0 (rows.jsonl:1), 'chosen': expected text"),
        ('{"prompt": "a" // no\n}', (), "rows.jsonl:1: a comment"),
        (None, ("sequence_length=4",), "sequence_length: unknown key"),
    ],
)
def test_mistakes_are_told_without_a_traceback(preprocess, tmp_path, rows, arguments, message):
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text(rows)
    done = preprocess("--show", "1", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_template_without_end_is_told_of_and_ended_by_its_key(preprocess, tmp_path):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "endless.jinja").write_text(endless)
    talk = {"messages": [{"role": "user", "content": "why?"}]}
    talk |= {key: {"role": "assistant", "content": key} for key in ("chosen", "rejected")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(talk))
    keys = ("chat_template=jinja", "chat_template_jinja=endless.jinja", "datasets.0.type=chat_template.default")
    done = preprocess(*keys, "chat_template_timeout=3", UPWEIGHT_HEARTBEAT=1)
    assert done.returncode == 2, done.stderr
    assert "s: preparing rows (chat_template_timeout: 3 s a row)" in done.stderr
    assert "it took longer than chat_template_timeout, 3 seconds" in done.stderr


def test_a_page_about_the_data(preprocess, tmp_path):
    done = upweight("data", "config.yaml", "--no-open", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / done.stdout.strip()).read_text()
    assert "3 training rows were compared" in page
    assert upweight("data", "config.yaml", "--no-open", "--output", "my.html", folder=tmp_path).stdout == "my.html\n"
