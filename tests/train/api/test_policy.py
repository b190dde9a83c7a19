import pytest
from peft import LoraConfig
from tokenizers import AddedToken

from parity_script import LOUD, ROWS, TEMPLATE, made_tokenizer, write_model
from upweight import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from upweight.errors import UserError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "loud.jinja").write_text(LOUD)
    write_model(tmp_path / "model", made_tokenizer(TEMPLATE), "SFT")
    write_model(tmp_path / "scores", made_tokenizer(TEMPLATE), "Reward")
    other = made_tokenizer(LOUD.replace("<|im_end|>", "<|over|>"))
    other.add_tokens([AddedToken("<|over|>", special=True)])
    other.eos_token = "<|over|>"
    other.save_pretrained(tmp_path / "other")
    return tmp_path


def sft(folder, place, **options):
    args = SFTConfig(output_dir=str(folder / "out"), chat_template_path=str(folder / place), use_cpu=True, max_steps=1)
    rows, tokenizer = ROWS["messages"][:2], made_tokenizer(TEMPLATE)
    return SFTTrainer(str(folder / "model"), args, train_dataset=rows, processing_class=tokenizer, **options)


def test_a_template_comes_from_a_file(folder):
    trainer = sft(folder, "loud.jinja")
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert text.startswith("<|im_start|>USER\nWhy?<|im_end|>")
    args = RewardConfig(
        output_dir=str(folder / "out"), chat_template_path=str(folder / "loud.jinja"), use_cpu=True, max_steps=1
    )
    tokenizer = made_tokenizer(TEMPLATE)
    rewards = RewardTrainer(
        str(folder / "scores"), args, train_dataset=ROWS["message pairs"], processing_class=tokenizer
    )
    assert "USER" in tokenizer.decode(rewards.train_dataset[0]["prompt_ids"])


def test_a_template_comes_from_another_tokenizer_with_its_tokens(folder):
    trainer = sft(folder, "other")
    assert trainer.processing_class.eos_token == "<|over|>"
    ids = trainer.train_dataset[0]["input_ids"]
    assert trainer.processing_class.decode(ids).endswith("No.<|over|>")
    assert max(ids) == 260 == trainer.model.get_input_embeddings().num_embeddings - 1
    trainer.train()


def test_new_tokens_have_to_be_trained(folder):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(UserError, match="does not know 1 of its tokens"):
        sft(folder, "other", peft_config=adapter)
    sft(folder, "loud.jinja", peft_config=adapter)


def test_a_place_without_a_template_is_named(folder):
    with pytest.raises(UserError, match="nowhere is no folder"):
        sft(folder, "nowhere")
    plain = made_tokenizer(TEMPLATE)
    plain.chat_template = None
    plain.save_pretrained(folder / "plain")
    with pytest.raises(UserError, match="has no chat template"):
        sft(folder, "plain")
