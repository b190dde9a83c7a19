"""A teacher behind a server, named by our keys and by Axolotl's."""

import json

import pytest
import yaml

from made_runs import write_model
from made_tokenizers import byte_tokenizer
from made_vllm import FakeVllm
from upweight.config.load import load_config
from upweight.errors import UserError
from upweight.train.distill.server import _tokens
from upweight.train.run import evaluate

ROWS = [
    {"messages": [{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": c * 3}]} for c in "abcdefgh"
]
BLOCK = {"on_policy": 0, "top_k": 6, "divergence": "forward_kl"}
AXOLOTL = {"kd_trainer": True, "kd_alpha": 1.0, "kd_ce_alpha": 0.0, "kd_temperature": 1.0, "kd_online_topk": 6}


@pytest.fixture
def models(tmp_path):
    write_model(tmp_path / "student", num_hidden_layers=1)
    write_model(tmp_path / "teacher", num_hidden_layers=2, hidden_size=16)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.fixture
def served(models):
    server = FakeVllm(models / "teacher")
    server.tokenizer = byte_tokenizer("chatml")
    yield server
    server.close()


def held_out(folder, **keys):
    content = {
        "base_model": str(folder / "student"), "chat_template": "chatml", "val_set_size": 4, "max_steps": 1,
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "chat_template"}],
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return evaluate(load_config(folder / "config.yaml"))


def test_a_server_teaches_as_the_same_model_in_this_process(models, served):
    here = held_out(models, rl="distill", distill={"teacher": str(models / "teacher"), **BLOCK})
    there = held_out(models, rl="distill", distill={"teacher": served.url, **BLOCK})
    for name in ("eval_loss", "eval_distill/agreement", "eval_distill/teacher_tail_mass"):
        assert here[name] == pytest.approx(there[name], abs=1e-4), name
    served.tokenizer.add_tokens(["Ask what"])
    with pytest.raises(UserError, match="has another tokenizer than the student: 'Ask what"):
        held_out(models, rl="distill", distill={"teacher": served.url, **BLOCK})


def test_axolotls_keys_name_a_server(models, served):
    here = held_out(models, rl="distill", distill={"teacher": str(models / "teacher"), **BLOCK, "tail": "drop"})
    there = held_out(models, **AXOLOTL, kd_online_server_base_url=served.url)
    assert here["eval_loss"] == pytest.approx(there["eval_loss"], abs=1e-4)
    with pytest.raises(UserError, match="kd_online_server: only a vLLM server"):
        held_out(models, **AXOLOTL, kd_online_server_base_url=served.url, kd_online_server="sglang")
    with pytest.raises(UserError, match=r"distill\.temperature: a listed teacher's tail is known at 1 only"):
        held_out(models, **AXOLOTL | {"kd_temperature": 2.0}, kd_online_server_base_url=served.url)


def test_minus_9999_is_a_probability_of_zero():
    row = {"5": {"logprob": -9999.0}, "7": {"logprob": -1.5}, "2": {"logprob": -0.25}}
    assert _tokens(row) == [(2, -0.25), (7, -1.5)]
    assert _tokens(None) == []
