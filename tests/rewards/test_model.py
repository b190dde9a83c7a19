import pytest
import torch
import transformers
import yaml
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForTokenClassification

from made_rewards import reward_call
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.config.sections.data import DatasetSpec
from upweight.errors import UserError
from upweight.inference.score import ScoreModel
from upweight.rewards.load import as_rewards, load_rewards
from upweight.rewards.model import ModelOptions, is_process_model, lowest_step_scores
from upweight.rewards.reward import RewardCall
from upweight.rewards.scorer import Scorer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer("chatml", TEMPLATE)


def classifier(tokenizer, **changes):
    auto = transformers.AutoModelForSequenceClassification
    return tiny("llama", auto, vocab_size=len(tokenizer), num_labels=1, **changes)


def alone(model, tokenizer, text: str) -> float:
    """The score of one text, forwarded without padding and read at its last token by hand."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state
        return model.score(hidden)[0, -1, 0].item()


def test_texts_are_scored_at_their_end_token(tokenizer):
    model = classifier(tokenizer)
    call = reward_call(["short", "a much longer completion than the others"], ["middle one"])
    texts = [f"{p}{c}<|im_end|>" for p, c in zip(call.prompts, call.completions, strict=True)]
    with Scorer(as_rewards((model, tokenizer))) as scorer:
        found = scorer.score(call).rewards_SR[:, 0]
    torch.testing.assert_close(found, torch.tensor([alone(model, tokenizer, text) for text in texts]))
    assert len({round(value, 4) for value in found.tolist()}) == 3


@pytest.mark.parametrize("padding", ["<|im_end|>", None])
def test_a_padding_token_that_texts_end_in_is_no_trap(tokenizer, padding):
    model = classifier(tokenizer)
    other = byte_tokenizer("chatml", TEMPLATE)
    other.pad_token = padding
    call = reward_call(["short", "a much longer completion"])
    before = model.config.pad_token_id
    with Scorer(as_rewards([model], [other])) as scorer:
        found = scorer.score(call).rewards_SR[:, 0].tolist()
    expected = [alone(model, tokenizer, f"prompt 0{text}<|im_end|>") for text in call.completions]
    assert found == pytest.approx(expected, abs=1e-4)
    assert model.config.pad_token_id == before


def chat_call() -> RewardCall:
    prompt = [{"role": "user", "content": "Two and two?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("four", "not sure at all")]
    return RewardCall([prompt] * 2, answers, [[1], [2]], {}, [0, 0])


def test_messages_go_through_the_models_own_template_from_a_folder(tokenizer, tmp_path):
    model = classifier(tokenizer)
    folder = tmp_path / "my-reward-model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    call = chat_call()
    texts = [tokenizer.apply_chat_template(call.prompts[0] + answer, tokenize=False) for answer in call.completions]
    with Scorer(load_rewards(["./my-reward-model"], tmp_path)) as scorer:
        assert scorer.names == ["my-reward-model"]
        found = scorer.score(call).rewards_SR[:, 0].tolist()
    assert found == pytest.approx([alone(model, tokenizer, text) for text in texts], abs=1e-4)
    # A model trained here saw no space after the last turn.
    (folder / "config.yaml").write_text("reward_model: true\n")
    with Scorer(load_rewards([str(folder)], tmp_path)) as scorer:
        found = scorer.score(call).rewards_SR[:, 0].tolist()
    assert found == pytest.approx([alone(model, tokenizer, text.rstrip()) for text in texts], abs=1e-4)


def test_a_template_that_does_not_end_is_stopped_by_the_configs_limit(tokenizer):
    endless = byte_tokenizer("chatml", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    call, options = chat_call(), ModelOptions(template_timeout=0.1)
    (reward,) = as_rewards([classifier(endless)], [endless], models=options)
    with pytest.raises(UserError, match=r"chat template took longer than chat_template_timeout, 0\.1 seconds"):
        reward.function(call.prompts, call.completions)


def test_an_adapter_folder_brings_its_base_model(tokenizer, tmp_path):
    base = tmp_path / "base"
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(base)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    adapted = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"], r=4))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name or "score" in name:
                weight.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    with Scorer(load_rewards([str(tmp_path / "adapter")], tmp_path)) as scorer:
        found = scorer.score(reward_call(["short"])).rewards_SR.item()
    merged = adapted.eval().merge_and_unload()
    assert found == pytest.approx(alone(merged, tokenizer, "prompt 0short<|im_end|>"), abs=1e-3)


def test_a_model_without_a_score_head_is_refused(tokenizer, tmp_path):
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match=r"is no reward model: its files lack score.weight"):
        load_rewards([str(tmp_path / "plain")], tmp_path)


def test_a_model_built_in_code_needs_its_tokenizer(tokenizer):
    with pytest.raises(UserError, match=r"pass \(model, tokenizer\)"):
        as_rewards(classifier(tokenizer))


TOKENIZER = byte_tokenizer("chatml")
SIZE = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}


def process(**changes):
    return tiny("llama", auto=AutoModelForTokenClassification, num_labels=2, **SIZE, **changes)


def steps_of(model, text, separator="\n"):
    entry = DatasetSpec(step_separator=separator)
    (scores,) = ScoreModel(model, TOKENIZER, "step_score", entry=entry)([{"prompt": "p", "completion": text}])
    return scores


def test_the_weakest_step_counts_and_nothing_said_has_no_score():
    model = process()
    scorer, asked = ScoreModel(model, TOKENIZER, "step_score"), ["p", "p", [{"role": "user", "content": "p"}]]
    found = lowest_step_scores(scorer, asked, ["one\ntwo", " ", [{"content": "one\ntwo"}]])
    assert found == [pytest.approx(min(steps_of(model, "one\ntwo"))), None, pytest.approx(found[0])]


def test_each_step_is_scored_at_the_token_that_ends_it(tmp_path):
    model = process()
    model.save_pretrained(tmp_path / "prm")
    TOKENIZER.save_pretrained(tmp_path / "prm")
    texts = ["one\n\ntwo \n", "three"]
    ids = [[*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id] for text in texts]
    call = RewardCall(["p", "p"], texts, ids, {}, [0, 0], decode=lambda one: TOKENIZER.decode(one, True))
    with Scorer(load_rewards([str(tmp_path / "prm")], tmp_path, models=ModelOptions(by_step=True))) as scorer:
        result = scorer.score(call)
    first, second = (dict(result.credits[number, 0]) for number in (0, 1))
    assert list(first) == [len("one"), len("one\n\ntwo ")]  # one token a byte
    assert list(second) == [len("three")]
    assert [*first.values()] == pytest.approx(steps_of(model, texts[0]), abs=1e-5)
    assert result.rewards_SR[:, 0].tolist() == pytest.approx([sum(first.values()), sum(second.values())])


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
    entry = DatasetSpec(step_separator=";")
    rows = [{"prompt": p, "completion": c} for p, c in zip(call.prompts, call.completions, strict=True)]
    right = [min(scores) for scores in ScoreModel(model, TOKENIZER, "step_score", entry=entry)(rows)]
    assert found == pytest.approx(right, abs=1e-5)
    assert len(ScoreModel(model, TOKENIZER, "step_score", entry=entry)(rows)[0]) == 2


def test_other_models_are_none(tmp_path):
    tiny("llama", **SIZE).save_pretrained(tmp_path)
    assert not is_process_model(str(tmp_path))
    assert not is_process_model("org/on-the-hub")
