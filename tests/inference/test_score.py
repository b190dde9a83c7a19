import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.config.sections.data import DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.inference.score import ScoreModel, load_score_model

TOKENIZER = byte_tokenizer("chatml")
SIZE = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}
ROWS = [
    {"prompt": "Why the dog?", "completion": " It is lazy."},
    {"prompt": "Why the dog?", "completion": " No."},
    {"prompt": "And the fox?", "completion": " It jumps over."},
]
STEPS = [
    {"prompt": "1+2+3?", "completions": ["1+2 is 3", "3+3 is 6"]},
    {"prompt": "1+2+3?", "completion": "1+2 is 3\n3+3 is 6\n\nso 6"},
]


def outcome():
    return tiny("llama", auto=AutoModelForSequenceClassification, num_labels=1, **SIZE)


def process(classes=2):
    return tiny("llama", auto=AutoModelForTokenClassification, num_labels=classes, **SIZE)


def plain_score(model, text: str) -> float:
    ids = torch.tensor([[*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]])
    with torch.no_grad():
        return model(input_ids=ids).logits[0, 0].item()


def test_outcome_scores_are_those_of_the_model_alone():
    model = outcome()
    right = [plain_score(model, row["prompt"] + row["completion"]) for row in ROWS]
    found = ScoreModel(model, TOKENIZER, "sequence_score")(ROWS)
    assert [score for (score,) in found] == pytest.approx(right, abs=1e-5)


def test_messages_and_chat_read_alike():
    scorer = ScoreModel(outcome(), TOKENIZER, "sequence_score", entry=DatasetSpec(chat_template="chatml"), chat=True)
    asked, said = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    alike = scorer(
        [
            {"prompt": "Why?", "completion": "So."},
            {"prompt": [asked], "completion": [said]},
            {"prompt": [asked], "completion": "So."},
            {"messages": [asked, said]},
        ]
    )
    assert max(alike) == pytest.approx(min(alike), abs=1e-6)
    scorer.chat = False
    assert scorer([{"prompt": "Why?", "completion": "So."}])[0] != pytest.approx(alike[0], abs=1e-4)


@pytest.mark.parametrize("classes", [1, 2])
def test_steps_get_the_probability_of_being_right(classes):
    model = process(classes)
    found = ScoreModel(model, TOKENIZER, "step_score", entry=DatasetSpec(step_separator="\n"))(STEPS)
    assert [len(scores) for scores in found] == [2, 3]
    ids = TOKENIZER("1+2+3?")["input_ids"]
    right = []
    for step in STEPS[0]["completions"]:
        ids = [*ids, *TOKENIZER(step)["input_ids"], *TOKENIZER("\n")["input_ids"]]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        right.append((logits.sigmoid()[0] if classes == 1 else logits.softmax(-1)[1]).item())
    assert found[0] == pytest.approx(right, abs=1e-5)
    assert found[1][:2] == pytest.approx(right, abs=1e-5)


def test_a_bad_row_is_named():
    with pytest.raises(UserError, match="row 12: 'completion'"):
        ScoreModel(outcome(), TOKENIZER, "sequence_score")([ROWS[0], {"prompt": "Why?", "completion": ""}], first=11)
    with pytest.raises(UserError, match="row 0: 'completion': expected one completion"):
        ScoreModel(outcome(), TOKENIZER, "sequence_score")([{"prompt": "Why?", "chosen": "So.", "rejected": "No."}])
    with pytest.raises(UserError, match="row 0: 'completions'"):
        ScoreModel(process(), TOKENIZER, "step_score")([{"prompt": "Why?"}])


def test_whole_models_and_adapters_load(tmp_path):
    model = outcome()
    model.save_pretrained(tmp_path / "whole")
    TOKENIZER.save_pretrained(tmp_path / "whole")
    section = ModelSection(base_model=str(tmp_path / "whole"))
    assert load_score_model(section)(ROWS) == ScoreModel(model, TOKENIZER, "sequence_score")(ROWS)

    tiny("llama", **SIZE).save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    TOKENIZER.save_pretrained(tmp_path / "adapter")
    scorer = load_score_model(ModelSection(base_model=str(tmp_path / "base")), tmp_path / "adapter")
    right = [plain_score(adapted.eval(), row["prompt"] + row["completion"]) for row in ROWS]
    assert [score for (score,) in scorer(ROWS)] == pytest.approx(right, abs=1e-5)


def test_a_language_model_has_no_scores(tmp_path):
    tiny("llama", **SIZE).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no reward model"):
        load_score_model(ModelSection(base_model=str(tmp_path)))
