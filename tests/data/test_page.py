"""The page about data: its numbers, and that it is one whole and safe file."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from upweight.data.page import write_page
from upweight.data.summary import examples, summarize

TALK = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "four five"}]


class Text(HTMLParser):
    """The text of a page, and its tags."""

    def __init__(self, page):
        super().__init__()
        self.text, self.tags = "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def chat(number):
    return {"messages": [{"role": "human", "content": f"question {number} of many"}, *TALK]}


def test_sources_tokens_and_turns(run):
    run.write([chat(number) for number in range(3)], "more.jsonl")
    entries = [{"path": path, "type": "chat_template"} for path in ("rows.jsonl", "more.jsonl")]
    keys = {"rl": None, "chat_template": "chatml", "datasets": entries, "val_set_size": 2}
    prepared = run([chat(number + 10) for number in range(7)], **keys)
    summary = summarize(run.config, prepared)
    train = [source for source in summary.sources if not source.evaluation]
    assert [(source.read, source.kept) for source in summary.sources][:2] == [(one.read, one.kept) for one in train]
    assert sum(source.kept for source in train) == 8
    assert sum(source.tokens for source in train) == sum(len(row["input_ids"]) for row in prepared.train)
    assert sum(source.trained for source in train) == sum(sum(row["loss_mask"]) for row in prepared.train)
    assert train[0].roles == {"user": 2 * train[0].kept, "assistant": train[0].kept}
    assert summary.comparison.contaminated == 0
    shown = list(examples(prepared, 4))
    assert {len(one.stretches) for one in shown} == {2}
    assert {one.where for one in shown} == {source.where for source in train}


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        ({}, {"prompt": "a b c", "chosen": "d e", "rejected": "f"}),
        ({"rl": "orpo"}, {"prompt": "a b c", "chosen": "d e", "rejected": "f"}),
        ({"rl": "kto", "kto_desirable_weight": 0}, {"prompt": "a b c", "completion": "d", "label": False}),
        ({"rl": None, "process_reward_model": True}, {"prompt": "a", "completions": ["b", "c"], "labels": [1, 0]}),
        ({"rl": "grpo", "trl": {"reward_funcs": ["x.y"]}}, {"prompt": "a b c", "answer": "d"}),
        ({"rl": None}, {"text": "a b c d"}),
    ],
)
def test_every_kind_of_data_has_a_page(run, keys, row):
    prepared = run([row] * 3, datasets=[{"path": "rows.jsonl"}], **keys)
    write_page([(run.config, prepared)], "mine", run.folder / "there" / "data.html")
    page = Text((run.folder / "there" / "data.html").read_text())
    assert "3 training rows were compared" in page.text
    assert "2 have the same words as an earlier one" in page.text
    (source,) = summarize(run.config, prepared).sources
    counts = [sum(len(ids) for name, ids in one.items() if name.endswith("_ids")) for one in prepared.train]
    assert source.tokens == sum(counts)
    assert 0 <= source.trained <= source.tokens
    assert (source.trained == 0) == (keys.get("rl") == "grpo")
    assert (source.trained == source.tokens) == (keys.get("rl") == "orpo")


def test_lengths_are_those_that_limits_apply_to(run):
    row = {"prompt": "a b c", "chosen": "d e f g", "rejected": "h"}
    prepared = run([row])
    summary = summarize(run.config, prepared)
    (one,) = prepared.train
    prompt, chosen, rejected = (len(one[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected"))
    assert {name: values.tolist() for name, values in summary.lengths.items()} == {
        "prompt": [prompt],
        "completion": [chosen],
        "sequence": [prompt + chosen],
    }
    assert summary.sources[0].tokens == prompt + chosen + rejected


def test_a_mixture_and_the_turns_of_its_datasets_are_shown(run):
    run.write([{"text": f"plain {number}"} for number in range(4)], "plain.jsonl")
    entries = [
        {"path": "rows.jsonl", "type": "chat_template", "weight": 3},
        {"path": "plain.jsonl", "type": "completion", "weight": 1},
    ]
    keys = {"rl": None, "chat_template": "chatml", "datasets": entries, "mix": "interleave_over"}
    prepared = run([chat(number) for number in range(6)], **keys)
    write_page([(run.config, prepared)], "mine", run.folder / "data.html")
    page = Text((run.folder / "data.html").read_text())
    assert "interleave_over: an epoch has 16 rows" in page.text
    assert "75.0% of the rows, 2.00 passes" in page.text
    roles = page.text[page.text.index("Turns by role") : page.text.index("Rows that resemble")]
    assert "rows.jsonl" in roles
    assert "plain.jsonl" not in roles


def test_the_page_loads_nothing_and_shows_rows_as_text(run):
    row = {"prompt": "<script>alert(1)</script> a b", "chosen": "<b>bold</b>", "rejected": "no"}
    others = [{**row, "prompt": f"{' '.join(map(str, np.arange(number, number + 100)))}"} for number in (0, 1, 500)]
    keys = {"test_datasets": [{"path": "rows.jsonl", "type": "chatml.prompt_pairs", "split": "train[:1]"}]}
    prepared = run([row, *others], dataset_contamination_check="warn", **keys)
    write_page([(run.config, prepared)] * 2, "mine", run.folder / "data.html")
    content = (run.folder / "data.html").read_text()
    page = Text(content)
    assert not {"script", "img", "b"} & {tag for tag, _ in page.tags}
    assert all(not attrs.get("href", "#").startswith("http") for _, attrs in page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert "1 resemble an earlier one by 0.8 or more" in page.text
    assert "1 contain an evaluation row" in page.text
    assert "<mark>&lt;b&gt;bold&lt;/b&gt;" in content
    assert re.search(r"style-src &#x27;sha256-[^;]+;", content)
    assert page.text.count("Stage") == 2
