import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForTokenClassification

from made_rewards import reward_call
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.config.sections.data import DatasetRow
from upweight.inference.score import ScoreModel
from upweight.rewards.load import load_rewards
from upweight.rewards.process import is_process_model, lowest_step_scores
from upweight.rewards.scorer import Scorer

TOKENIZER = byte_tokenizer("chatml")
SIZE = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}


def process(**changes):
    return tiny("llama", auto=AutoModelForTokenClassification, num_labels=2, **SIZE, **changes)


def steps_of(model, text, separator="\n"):
    entry = DatasetRow(step_separator=separator)
    (scores,) = ScoreModel(model, TOKENIZER, "step_score", entry=entry)([{"prompt": "p", "completion": text}])
    return scores


def test_the_weakest_step_counts_and_nothing_said_has_no_score():
    model = process()
    scorer, asked = ScoreModel(model, TOKENIZER, "step_score"), ["p", "p", [{"role": "user", "content": "p"}]]
    found = lowest_step_scores(scorer, asked, ["one\ntwo", " ", [{"content": "one\ntwo"}]])
    assert found == [pytest.approx(min(steps_of(model, "one\ntwo"))), None, pytest.approx(found[0])]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_folder_serves_by_its_path(tmp_path, adapter):
    model = process()
    if adapter:
        tiny("llama", **SIZE).save_pretrained(tmp_path / "base")
        base = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=2)
        model = get_peft_model(base, LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"])).eval()
    model.save_pretrained(tmp_path / "prm")
    TOKENIZER.save_pretrained(tmp_path / "prm")
    (tmp_path / "prm" / "config.yaml").write_text(yaml.safe_dump({"datasets": [{"step_separator": ";"}]}))
    assert is_process_model(str(tmp_path / "prm"))
    rewards = load_rewards([str(tmp_path / "prm")], tmp_path)
    call = reward_call(["one;two", "three"])
    with Scorer(rewards) as scorer:
        found = scorer.score(call).rewards_SR[:, 0].tolist()
    entry = DatasetRow(step_separator=";")
    rows = [{"prompt": p, "completion": c} for p, c in zip(call.prompts, call.completions, strict=True)]
    right = [min(scores) for scores in ScoreModel(model, TOKENIZER, "step_score", entry=entry)(rows)]
    assert found == pytest.approx(right, abs=1e-5)
    assert len(ScoreModel(model, TOKENIZER, "step_score", entry=entry)(rows)[0]) == 2


def test_other_models_are_none(tmp_path):
    tiny("llama", **SIZE).save_pretrained(tmp_path)
    assert not is_process_model(str(tmp_path))
    assert not is_process_model("org/on-the-hub")
