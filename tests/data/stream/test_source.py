import json
from pathlib import Path

import pytest
from datasets import Dataset

from made_tokenizers import byte_tokenizer
from upweight.config import parse_config
from upweight.data.prepare import prepare, preview, shown_rows
from upweight.data.stream.build import build_feed, mixture_lines, streamed_evaluation
from upweight.errors import UserError


def write_rows(file, count, start=0):
    rows = [{"text": f"{number} " + "abcdefgh"[: number % 8]} for number in range(start, start + count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(folder, *datasets, **keys):
    entries = [{"type": "completion", **entry} for entry in datasets]
    content = {"base_model": "m", "datasets": entries, "max_steps": 5, **keys}
    return parse_config({"dataset_prepared_path": str(folder / "prepared"), **content}, folder=folder)


def feed_of(config):
    return build_feed(config, byte_tokenizer(), prepare(config, byte_tokenizer())).feed


def texts(rows):
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(fed.row["input_ids"], skip_special_tokens=True) for fed in rows]


def numbers(rows):
    return [int(text.split()[0]) for text in texts(rows)]


@pytest.fixture
def feeds():
    made = []

    def make(config):
        made.append(feed_of(config))
        return made[-1]

    yield make
    for feed in made:
        feed.close()


def test_a_stream_has_every_row_once_in_each_pass_and_its_order_is_shuffled_in_blocks(tmp_path, feeds):
    write_rows(tmp_path / "rows.jsonl", 1500)
    feed = feeds(config_of(tmp_path, {"path": "rows.jsonl", "streaming": True}, streaming_buffer_size=512))
    first, second = numbers(feed.take(1500)), numbers(feed.take(1500))
    assert sorted(first) == sorted(second) == list(range(1500))
    assert first != second
    assert first != sorted(first)
    assert sorted(first[:512]) == list(range(512))
    for seeds, same in ({"seed": 1}, False), ({"seed": 1, "data_seed": 42}, True):
        other = config_of(tmp_path, {"path": "rows.jsonl", "streaming": True}, streaming_buffer_size=512, **seeds)
        assert (numbers(feeds(other).take(1500)) == first) is same
    in_order = feeds(config_of(tmp_path, {"path": "rows.jsonl"}, streaming=True, curriculum_sampling=True))
    assert numbers(in_order.take(1600)) == [*range(1500), *range(100)]


@pytest.mark.parametrize("stop", [1, 511, 512, 513, 1499, 1500, 1501, 2100])
def test_a_stream_goes_on_exactly_with_its_shuffle_buffer(stop, tmp_path, feeds):
    write_rows(tmp_path / "rows.jsonl", 1500)
    config = config_of(tmp_path, {"path": "rows.jsonl", "streaming": True}, streaming_buffer_size=512)
    feed = feeds(config)
    whole = numbers(feed.take(2300))
    feed.restore(None)
    assert numbers(feed.take(stop)) == whole[:stop]
    later = feeds(config)
    later.restore(json.loads(json.dumps(feed.state())))
    assert numbers(later.take(2300 - stop)) == whole[stop:]


def test_rows_are_what_prepared_rows_are(tmp_path, feeds):
    write_rows(tmp_path / "rows.jsonl", 40)
    stream = feeds(config_of(tmp_path, {"path": "rows.jsonl", "streaming": True}, min_sample_len=6))
    plain = prepare(config_of(tmp_path, {"path": "rows.jsonl"}, min_sample_len=6), byte_tokenizer()).train
    key = lambda row: row["input_ids"]  # noqa: E731
    assert 0 < len(plain) < 40  # short ones are dropped
    assert sorted((fed.row for fed in stream.take(len(plain))), key=key) == sorted(plain, key=key)


def test_folders_globs_and_saved_datasets_are_streamed(tmp_path, feeds):
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in range(3):
        write_rows(parts / f"part-{number}.jsonl", 10, 10 * number)
    Dataset.from_list([{"text": f"{n} a"} for n in range(30)]).save_to_disk(str(tmp_path / "saved"))
    for path in ("parts", "parts/*.jsonl", str(parts / "part-?.jsonl"), "saved"):
        feed = feeds(config_of(tmp_path, {"path": path, "streaming": True}, curriculum_sampling=True))
        assert numbers(feed.take(30)) == list(range(30))


def test_the_first_rows_can_be_held_out_and_a_stream_cut_short(tmp_path, feeds):
    write_rows(tmp_path / "rows.jsonl", 900)
    entry = {"path": "rows.jsonl", "streaming": True, "skip": 100, "max_samples": 700}
    config = config_of(tmp_path, entry, val_set_size=300)
    held_out = streamed_evaluation(config, byte_tokenizer())
    tokenizer = byte_tokenizer()
    assert [int(tokenizer.decode(row["input_ids"]).split()[0]) for row in held_out] == list(range(100, 400))
    feed = feeds(config)
    assert sorted(numbers(feed.take(400))) == list(range(400, 800))
    assert sorted(numbers(feed.take(400))) == list(range(400, 800))
    assert feed.epoch_rows is None  # a text of this type may be several rows
    plain = feeds(config_of(tmp_path, {**entry, "type": None}, val_set_size=300))
    assert sorted(numbers(plain.take(400))) == list(range(400, 800))
    assert len(plain) == 400


def test_rows_that_a_chat_template_makes_several_are_warned_of(tmp_path, feeds, caplog, monkeypatch):
    monkeypatch.setattr("upweight.log._warned", set())
    turns = [{"role": role, "content": f"{role} {turn}"} for turn in (1, 2) for role in ("user", "assistant")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    forgets = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else 'gone' }}{% endfor %}"
    entry = {"path": "rows.jsonl", "streaming": True, "type": "chat_template", "max_samples": 1}
    feed = feeds(config_of(tmp_path, entry, chat_template="jinja", chat_template_jinja=forgets))
    assert len(feed) == 1
    assert sorted(texts(feed.take(2))) == ["user 1assistant 1", "user 1goneuser 2assistant 2"]
    assert "rows.jsonl): some rows become several sequences" in caplog.text


def test_streams_and_prepared_rows_are_mixed(tmp_path, feeds):
    write_rows(tmp_path / "a.jsonl", 300)
    write_rows(tmp_path / "b.jsonl", 200, 1000)
    entries = {"path": "a.jsonl", "streaming": True, "weight": 3}, {"path": "b.jsonl", "weight": 1}
    feed = feeds(config_of(tmp_path, *entries, mix="interleave_over"))
    assert list(feed.names) == ["a", "b"]
    taken = feed.take(400)
    assert [fed.source for fed in taken].count(1) == 100
    assert sorted(number for number in numbers(taken) if number < 1000) == list(range(300))
    assert len({number for number in numbers(taken) if number >= 1000}) == 100


@pytest.mark.parametrize("skip", [0, 270])
def test_a_bad_row_of_a_stream_is_named(skip, tmp_path, feeds):
    file = write_rows(tmp_path / "rows.jsonl", 500)
    with file.open("a") as lines:
        lines.write('{"other": "a"}\n')
    entry = {"path": "rows.jsonl", "streaming": True, "skip": skip}
    feed = feeds(config_of(tmp_path, entry, streaming_buffer_size=256))
    if not skip:
        feed.take(250)
    with pytest.raises(UserError, match=r"datasets\[0\] \(rows.jsonl\), row 500 \(rows.jsonl:501\), 'text'"):
        feed.take(300)


@pytest.mark.parametrize(("name", "key"), [("completion", "field"), ("pretrain", "text_column")])
def test_a_column_of_another_name_has_its_key_named(name, key, tmp_path, feeds):
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}\n')
    entry = {"path": "rows.jsonl", "streaming": True, "type": name}
    with pytest.raises(UserError, match=f"`{key}: NAME` reads a column of another name"):
        feeds(config_of(tmp_path, entry)).take(1)
    assert texts(feeds(config_of(tmp_path, {**entry, key: "body"})).take(1)) == ["a"]


def test_a_stream_without_usable_rows_is_refused(tmp_path, feeds):
    Path(tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty.jsonl\): has no rows"):
        feeds(config_of(tmp_path, {"path": "empty.jsonl", "streaming": True})).take(1)
    write_rows(tmp_path / "rows.jsonl", 20)
    with pytest.raises(UserError, match=r"has no rows that can be used .20 dropped: shorter than min_sample_len"):
        feeds(config_of(tmp_path, {"path": "rows.jsonl", "streaming": True}, min_sample_len=99)).take(1)


def test_splits_that_a_stream_does_not_have_are_refused(tmp_path, feeds):
    write_rows(tmp_path / "rows.jsonl", 20)
    with pytest.raises(UserError, match="split 'test' cannot be streamed"):
        feeds(config_of(tmp_path, {"path": "rows.jsonl", "streaming": True, "split": "test"}))


def test_reports_show_the_first_rows_of_a_stream_and_the_shares_of_a_mixture(tmp_path):
    write_rows(tmp_path / "a.jsonl", 2000)
    write_rows(tmp_path / "b.jsonl", 200)
    entries = {"path": "a.jsonl", "streaming": True, "weight": 3}, {"path": "b.jsonl", "weight": 1}
    config = config_of(tmp_path, *entries, mix="interleave_over")
    prepared = preview(config, byte_tokenizer())
    assert prepared.report.lines()[0] == "datasets[0] (a.jsonl), first rows: 1,000 rows read, 1,000 kept"
    assert len(list(shown_rows(config, prepared, 3, tokens=True))) == 3
    shares = ["datasets[0] (a.jsonl), first rows: 75.0% of the rows", "datasets[1] (b.jsonl): 25.0% of the rows"]
    assert mixture_lines(config, prepared.report) == shares
    plain = config_of(
        tmp_path, {"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}, mix="interleave_under"
    )
    assert mixture_lines(plain, preview(plain, byte_tokenizer()).report) == [
        "interleave_under: an epoch has 800 rows",
        "datasets[0] (a.jsonl): 75.0% of the rows, 0.30 passes",
        "datasets[1] (b.jsonl): 25.0% of the rows, 1.00 passes",
    ]


def test_rows_are_ordered_by_a_column(tmp_path, feeds):
    rows = [{"text": f"{number} a", "level": (number * 7) % 40} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(tmp_path, {"path": "rows.jsonl"}, curriculum_column="level")
    decode = byte_tokenizer().decode
    ordered = [int(decode(row["input_ids"]).split()[0]) for row in prepare(config, byte_tokenizer()).train]
    assert [rows[number]["level"] for number in ordered] == list(range(40))
    mixed = feeds(config_of(tmp_path, {"path": "rows.jsonl"}, curriculum_column="level", mix="interleave_over"))
    assert numbers(mixed.take(40)) == ordered
    with pytest.raises(UserError, match=r"row 0 \(rows.jsonl:1\), 'other': expected a number"):
        prepare(config_of(tmp_path, {"path": "rows.jsonl"}, curriculum_column="other"), byte_tokenizer())
