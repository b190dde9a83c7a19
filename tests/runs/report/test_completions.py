"""Completions on the page."""

import json

import pytest

from made_reports import as_lines, completion, with_pictures, write_run
from upweight.runs.report import completions as written
from upweight.runs.report.completions import CompletionsReader, by_importance, conversation, reward_ranges, shown


def test_the_reward_is_the_weighted_sum_of_what_applies():
    row = shown(completion(1), [2.0, 0.5])
    assert row["reward"] == 2.0
    assert row["rewards"] == {"correct": 1.0, "length": None}
    assert row["columns"] == {"answer": "Rome"}
    assert shown(completion(1, rewards={"a": 1.0, "b": 0.5}), [])["reward"] == 1.5
    assert "reward" not in shown(completion(1, rewards={"a": None}), [])


def test_tokens_come_along_where_they_fit_together():
    tokens = {"token_texts": ["an", "swer"], "sampler_logps": [-0.1, -0.2], "policy_logps": [-0.1]}
    row = shown(completion(1, **tokens), [])
    assert row["token_texts"] == ["an", "swer"]
    assert row["sampler_logps"] == [-0.1, -0.2]
    assert "policy_logps" not in row
    assert "sampler_logps" not in shown(completion(1, sampler_logps=[-0.1]), [])


def test_conversations_of_every_kind():
    assert conversation("hi", "user") == [{"role": "user", "content": "hi"}]
    assert conversation(None, "user") == []
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}, {"name": "now"}, "odd"]
    (called,) = conversation([{"role": "assistant", "content": None, "tool_calls": calls}], "assistant")
    assert called == {"role": "assistant", "content": 'add({"a": 1})\nnow()\nodd'}
    assert conversation([{"content": ["a"]}, 3], "tool") == [
        {"role": "tool", "content": '["a"]'},
        {"role": "tool", "content": "3"},
    ]


def test_the_ends_and_the_newest_steps_come_first():
    steps = {"": list(range(1, 501)), "eval": list(range(0, 501, 10))}
    wanted = by_importance(steps)
    assert set(wanted[:4]) == {("", 500), ("", 1), ("eval", 500), ("eval", 0)}
    trained = sorted(step for name, step in wanted if name == "")
    assert len(trained) == written.ROLLOUTS
    assert trained[-written.NEWEST :] == list(range(491, 501))
    assert sum(name == "eval" for name, _ in wanted) <= written.EVALUATIONS + 2


def test_the_page_stays_within_bounds_and_says_what_is_not_on_it(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST_CHARACTERS", 20_000)
    monkeypatch.setattr(written, "ROWS", 3)
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in range(1, 31):
        rows = [completion(step, place, completion="word " * 5000) for place in range(5)]
        (folder / f"step_{step:05d}.jsonl").write_text(as_lines(rows if step == 15 else rows[:1]))
    (folder / "notes.jsonl").write_text("{}\n")
    parts, (note,) = CompletionsReader(tmp_path).read([])
    assert len(json.dumps(parts)) < 21_000
    assert {30, 1} <= {part["step"] for part in parts}
    assert note.startswith(f"Of 30 rollouts and evaluations, {len(parts)} are on this page.")


def test_rows_beyond_the_bound_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(written, "ROWS", 3)
    (tmp_path / "completions").mkdir()
    file = tmp_path / "completions" / "step_00001.jsonl"
    file.write_text(as_lines(completion(1, place) for place in range(5)))
    reader = CompletionsReader(tmp_path)
    parts, notes = reader.read([])
    assert (parts[0]["total"], len(parts[0]["rows"])) == (5, 3)
    assert notes == ["2 completions of the steps shown are not on it. All of them are in completions/."]
    file.write_text(as_lines([completion(1)]))
    assert reader.read([])[0][0]["total"] == 1


def test_rewards_and_lengths_of_a_file_are_measured(tmp_path):
    run = write_run(tmp_path / "run")
    parts, _ = CompletionsReader(run).read([2.0, 0.5])
    first = next(part for part in parts if part["set"] == "")
    assert first["rewards"] == [2.0] * 4  # a reward that does not apply counts nothing
    assert first["lengths"] == [2] * 4
    assert reward_ranges(parts)["rewards/correct/mean"] == [1.0, 1.0]
    assert reward_ranges(parts)["reward"] == [2.0, 2.0]


def test_images_of_prompts_come_small_and_once(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = write_run(tmp_path / "run")
    image.new("RGB", (600, 300), (200, 30, 30)).save(tmp_path / "red.png")
    (tmp_path / "text.png").write_text("no picture")
    refs = [{"digest": name, "path": str(tmp_path / f"{name}.png"), "tokens": 4} for name in ("red", "text", "gone")]
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour?"}]}]
    rows = [completion(3, place, images=refs, prompt=prompt) for place in range(3)]
    (folder / "completions" / "step_00003.jsonl").write_text(as_lines(rows))
    reader = CompletionsReader(folder)
    parts, _ = reader.read([])
    (part,) = (part for part in parts if part["step"] == 3)
    assert part["rows"][0]["images"] == ["red", "text", "gone"]
    assert part["rows"][0]["prompt"] == [{"role": "user", "content": "[image] colour?"}]
    assert "images" not in part["rows"][0]["columns"]
    pictures = reader.pictures(parts)
    assert list(pictures) == ["red"]  # what is no picture never reaches the page
    assert pictures["red"].startswith("data:image/jpeg;base64,")
    assert len(pictures["red"]) < 10_000
    assert "images" in shown(completion(1, images=["a column of the user's"]), [])["columns"]


def test_images_that_tools_returned_come_with_their_completion(tmp_path):
    pytest.importorskip("PIL.Image")
    folder = write_run(tmp_path / "run")
    with_pictures(folder, 3)
    reader = CompletionsReader(folder)
    parts, _ = reader.read([])
    (part,) = (part for part in parts if part["step"] == 3)
    first, second = part["rows"]
    assert (first["images"], first["observed_images"]) == (["red"], ["blue"])
    assert "observed_images" not in second
    assert "observed_images" not in first["columns"]
    assert list(reader.pictures(parts)) == ["red", "blue"]
