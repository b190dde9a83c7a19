"""Completions as files: token by token, within bounds."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from made_tokenizers import byte_tokenizer
from upweight.rollout.rollout import Rollout
from upweight.train.recording import completions
from upweight.train.recording.completions import CompletionFiles, ShownCompletions, token_texts
from upweight.types import Completion, Group


def decode(ids):
    return str(byte_tokenizer().decode(ids, skip_special_tokens=True))


def ids_of(text):
    return byte_tokenizer().encode(text, add_special_tokens=False)


def rollout(*written: Completion) -> Rollout:
    rewards_SR = torch.zeros(len(written), 1)
    return Rollout(3, 0, [Group(0, {"prompt": "p"}, [1], list(written), rewards_SR, rewards_SR[:, 0])])


def rows_of(folder, name="step_00001"):
    return [json.loads(line) for line in (folder / "completions" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("width", [80, 200])
def test_headings_stay_whole_and_logged_columns_are_shown(width):
    names = ["think_format_reward", "accuracy_reward", "length"]
    numbers = torch.tensor([[0.5, 1.0, 0.25]])
    group = Group(0, {"prompt": "Why? " * 30}, [1], [Completion(ids_of("so " * 60), [], [0] * 3, True)], numbers)
    group = dataclasses.replace(group, advantage_S=numbers[:, 0], extras={"answer_parsed": ["forty-two"]})
    shown, text = ShownCompletions(1, 4, names, decode), io.StringIO()
    shown.console = Console(file=text, width=width)
    shown(Rollout(0, 0, [group]), 1)
    assert all(len(line) <= width for line in text.getvalue().splitlines())
    for word in (*names, "prompt", "completion", "advantage", "answer_parsed", "forty-two", "0.25"):
        assert word in text.getvalue()


def test_texts_of_tokens_join_to_the_text_and_letters_stay_whole():
    ids = ids_of("a süß é")
    texts = token_texts(ids, decode, {})
    assert len(texts) == len(ids)
    assert "".join(texts) == decode(ids) == "a süß é"


def test_a_leading_space_that_a_tokenizer_drops_is_kept():
    words = {1: "the", 2: "cat"}
    assert token_texts([1, 2], lambda ids: " ".join(words[one] for one in ids), {}) == [" the", " cat"]


def test_files_hold_tokens_with_what_sampler_and_policy_said(tmp_path):
    ids = ids_of("abc")
    one = Completion(ids, [-0.12345, -0.2, -0.3], [0] * 3, True)
    other = Completion(ids, [-0.1, 0.0, -0.3], [0] * 3, True, sampled=[True, False, True])
    CompletionFiles(tmp_path, ["r"], decode, lambda: [None, [-0.4, -0.5]])(rollout(one, other), 1)
    first, second = rows_of(tmp_path)
    assert first["token_texts"] == ["a", "b", "c"]
    assert first["sampler_logps"] == [-0.1235, -0.2, -0.3]
    assert "policy_logps" not in first
    assert second["policy_logps"] == [-0.4, None, -0.5]
    assert second["sampled"] == [True, False, True]


def test_only_so_many_tokens_are_written_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(completions, "TOKENS_WRITTEN", 4)
    written = [Completion(ids_of("abc"), [], [0] * 3, True) for _ in range(2)]
    CompletionFiles(tmp_path, ["r"], decode)(rollout(*written), 1, "eval")
    first, second = rows_of(tmp_path, "eval_step_00001")
    assert "token_texts" in first
    assert "sampler_logps" not in first
    assert "token_texts" not in second
    assert second["completion"] == "abc"
