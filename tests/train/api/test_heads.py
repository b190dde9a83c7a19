"""Heads that a trainer takes, and how rows are laid out."""

import pytest
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from parity_script import QUESTIONS, ROWS, TEMPLATE, made_tokenizer, write_model
from upweight import (
    DPOConfig,
    DPOTrainer,
    ORPOConfig,
    ORPOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from upweight.errors import UserError

COMMON = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
STEPS = [{"prompt": question, "completions": ["One.", "Two."], "labels": [True, False]} for question in QUESTIONS]


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE, bos=False), trainer="DPO")
    return tmp_path


@pytest.mark.parametrize(
    ("trainer_class", "labels", "message"),
    [(RewardTrainer, 2, "1 output, not 2.*num_labels=1"), (PRMTrainer, 1, "at least 2 outputs, not 1.*num_labels=2")],
)
@pytest.mark.parametrize("given", ["name", "object"])
def test_a_head_with_outputs_that_the_method_does_not_train_is_refused(given, trainer_class, labels, message, folder):
    config, rows = (RewardConfig, ROWS["pairs"]) if trainer_class is RewardTrainer else (PRMConfig, STEPS)
    options = {"num_labels": labels} if given == "name" else None
    model = str(folder / "model")
    if given == "object":
        auto = AutoModelForSequenceClassification if trainer_class is RewardTrainer else AutoModelForTokenClassification
        model = auto.from_pretrained(model, num_labels=labels)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def start():
        args = config(output_dir=str(folder / "out"), model_init_kwargs=options, **COMMON)
        trainer_class(model, args=args, train_dataset=rows, processing_class=tokenizer)

    with pytest.raises(UserError, match=message):
        start()


def test_a_model_with_the_other_head_is_refused(folder):
    args = RewardConfig(output_dir=str(folder / "out"), **COMMON)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with pytest.raises(UserError, match="AutoModelForSequenceClassification"):
        RewardTrainer(model, args=args, train_dataset=ROWS["pairs"], processing_class=tokenizer)


def test_encoder_decoders_are_refused_by_name(folder):
    model = T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    model.save_pretrained(folder / "t5")
    given = {"train_dataset": ROWS["pairs"], "processing_class": AutoTokenizer.from_pretrained(folder / "model")}
    for one in (model, str(folder / "t5")):
        with pytest.raises(UserError, match="encoder-decoder"):
            ORPOTrainer(one, ORPOConfig(output_dir=str(folder / "out"), **COMMON), **given)


@pytest.mark.parametrize("config_class", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_virtual_tokens_are_refused_by_name(config_class, folder):
    peft_config = config_class(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    given = {"train_dataset": ROWS["text"], "processing_class": AutoTokenizer.from_pretrained(folder / "model")}
    args = SFTConfig(output_dir=str(folder / "out"), **COMMON)
    with pytest.raises(UserError, match=r"prompt and prefix tuning .* use LoRA"):
        SFTTrainer(str(folder / "model"), args, peft_config=peft_config, **given)
    with pytest.raises(UserError, match=r"prompt and prefix tuning .* use LoRA"):
        SFTTrainer(get_peft_model(model, peft_config), args, **given)


@pytest.mark.parametrize("layout", ["padded", "tree"])
def test_the_layout_is_an_argument(layout, folder):
    args = DPOConfig(output_dir=str(folder / "out"), layout=layout, **COMMON)
    assert DPOTrainer(str(folder / "model"), args=args, train_dataset=ROWS["pairs"]).runner.engine.layout == layout
    with pytest.raises(UserError, match="layout"):
        DPOConfig(output_dir=str(folder / "out"), layout="trees")
