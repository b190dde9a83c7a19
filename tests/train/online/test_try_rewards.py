"""A config's rewards on samples of its model, and on rows of a file."""

import pytest

from made_runs import write_online
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.online.try_rewards import try_on_rows, try_on_samples

CHAT = [{"role": "user", "content": "say a"}]


def test_samples_of_the_model_are_scored(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder)
    tried = try_on_samples(load_config(file), prompts=3, count=4)
    assert (len(tried.call), len(tried.call.groups())) == (12, 3)
    assert [trial.name for trial in tried.trials] == ["vowels"]
    assert len(set(tried.trials[0].scores)) > 1
    assert not list((tmp_path / "out").iterdir())
    again = try_on_samples(load_config(file), prompts=3, count=4)
    assert again.call.completions == tried.call.completions


def test_rows_of_a_file_need_no_model(tmp_path):
    file = write_online(tmp_path, tmp_path / "no model here")
    rows = [{"prompt": CHAT, "completion": text, "answer": "a"} for text in ("a e i", "xyz", "aaa")]
    tried = try_on_rows(load_config(file), [*rows, {"prompt": "plain", "completion": "uuu"}])
    assert tried.call.group_S == [0, 0, 0, 1]
    assert tried.call.completions[0] == [{"role": "assistant", "content": "a e i"}]
    assert tried.call.columns == {"answer": ["a", "a", "a", None]}
    plain = tried.as_plain()
    (reward,) = plain["rewards"]
    assert reward["best"][0] == {"score": 0.75, "prompt": CHAT, "completion": "aaa"}
    assert reward["worst"][-1]["completion"] == "xyz"


def test_rewards_that_count_tokens_get_them(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder, rewards=["length(minimum=3, unit='tokens')"])
    tried = try_on_rows(load_config(file), [{"prompt": "p", "completion": text} for text in ("", "a longer text")])
    assert tried.trials[0].scores == [0.0, 1.0]


def test_what_cannot_be_tried_is_said(tmp_path):
    with pytest.raises(UserError, match="row 2 of the completions has no 'completion'"):
        try_on_rows(load_config(write_online(tmp_path, tmp_path)), [{"completion": "a"}, {"prompt": "b"}])
    with pytest.raises(UserError, match=r"trl.reward_funcs is empty"):
        try_on_rows(load_config(write_online(tmp_path, tmp_path, rl="dpo", trl=None)), [{"completion": "a"}])
