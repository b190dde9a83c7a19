"""Reward models from their training to a file of scores."""

import json

import pytest

from made_runs import write_config
from upweight.cli.inference import run_score as run
from upweight.cli.inputs import read_rows
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.run import train

ORM = {"rl": None, "reward_model": True, "max_steps": 12, "learning_rate": 0.01}
LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4}


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("adapter", [{}, LORA])
def test_an_outcome_reward_model_prefers_what_it_was_trained_to(model_folder, tmp_path, adapter, capsys, caplog):
    config = write_config(tmp_path, model_folder, **ORM, **adapter)
    train(load_config(config))
    asked = tmp_path / "asked.jsonl"
    pairs = [
        (row["question"], side, row[side]) for row in lines(tmp_path / "pairs.jsonl") for side in ("chosen", "rejected")
    ]
    asked.write_text("".join(json.dumps({"prompt": p, "completion": c, "side": s}) + "\n" for p, s, c in pairs))
    run(str(config), asked, [], output=tmp_path / "scores.jsonl", chat=False)
    found = lines(tmp_path / "scores.jsonl")
    assert [row["side"] for row in found] == [side for _, side, _ in pairs]
    better = [one["score"] > two["score"] for one, two in zip(found[::2], found[1::2], strict=True)]
    assert sum(better) / len(better) > 0.8
    capsys.readouterr()
    with caplog.at_level("INFO", "upweight"):
        run(str(tmp_path / "out"), asked, [], output=None, chat=False)
    assert "fresh head" not in caplog.text
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found


def test_the_head_of_an_adapter_is_not_called_fresh(model_folder, tmp_path, caplog):
    config = write_config(tmp_path, model_folder, **{**ORM, **LORA, "max_steps": 1})
    with caplog.at_level("INFO", "upweight"):
        train(load_config(config))
        assert "fresh head: score.weight" in caplog.text
        caplog.clear()
        train(load_config(config, [f"lora_model_dir={tmp_path / 'out'}", f"output_dir={tmp_path / 'next'}"]))
    assert "adapter: the one in" in caplog.text
    assert "fresh head" not in caplog.text


def test_a_process_reward_model_scores_each_step(model_folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    steps = [
        {"prompt": f"question {n % 4}", "completions": ["the fox jumps", "a dog"], "labels": [True, False]}
        for n in range(16)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in steps))
    keys = {"rl": None, "process_reward_model": True, "max_steps": 12, "learning_rate": 0.01}
    config = write_config(tmp_path, model_folder, datasets=[{"path": str(rows), "type": "stepwise_supervised"}], **keys)
    train(load_config(config))
    capsys.readouterr()
    run(str(config), rows, [], output=None, chat=False)
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    good, bad = found["step_scores"]
    assert good > 0.5 > bad
    assert (found["mean"], found["min"]) == (pytest.approx((good + bad) / 2), bad)


def test_rows_may_hold_ends_of_lines_that_json_does_not_know(tmp_path):
    rows = [{"prompt": "a\u2028b", "completion": "c\x85d"}, {"prompt": "e", "completion": "f"}]
    (tmp_path / "rows.jsonl").write_text("\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_what_is_wrong_is_said(model_folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not JSON"):
        run(str(model_folder), file, [], output=None, chat=False)
    file.write_bytes('{"prompt": "é", "completion": "b"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        run(str(model_folder), file, [], output=None, chat=False)
    with pytest.raises(UserError, match="no such file"):
        run(str(model_folder), tmp_path / "none", [], output=None, chat=False)
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match="no reward model"):
        run(str(model_folder), file, [], output=None, chat=False)
