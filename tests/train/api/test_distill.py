import pytest

import upweight
from made_runs import write_model
from made_tokenizers import byte_tokenizer
from tiny_models import tiny
from upweight.errors import UserError

CHATS = [
    {"messages": [{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": c * 3}]} for c in "abcd"
]
PROMPTS = [{"prompt": [{"role": "user", "content": f"say {c}"}]} for c in "abcd"]


@pytest.fixture
def models(tmp_path):
    for number, name in enumerate(("student", "teacher")):
        write_model(tmp_path / name, num_hidden_layers=1 + number)
    return tmp_path


def settings(folder, **more):
    options = {"max_steps": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    kept = {"output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared")}
    return {**options, **kept, "per_device_train_batch_size": 4, "learning_rate": 1e-3, **more}


def tokenizer():
    made = byte_tokenizer("chatml")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("lmbda", [0.0, 0.5, 1.0])
def test_gkd_takes_a_share_of_completions_from_the_student(models, lmbda):
    args = upweight.GKDConfig(**settings(models, lmbda=lmbda, beta=0.3, max_new_tokens=5))
    trainer = upweight.GKDTrainer(
        str(models / "student"), str(models / "teacher"), args, train_dataset=CHATS, eval_dataset=CHATS[:2],
        processing_class=tokenizer(),
    )  # fmt: skip
    assert trainer.method.kind == "jsd"
    assert trainer.method.on_policy == lmbda
    assert len(losses(trainer)) == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_distillation_samples_and_compares_at_one_temperature(models):
    args = upweight.DistillationConfig(**settings(models, temperature=0.7, max_completion_length=5))
    teacher = tiny("llama", num_hidden_layers=2, vocab_size=len(byte_tokenizer("chatml")))
    trainer = upweight.DistillationTrainer(
        str(models / "student"), teacher, args, train_dataset=PROMPTS, processing_class=tokenizer()
    )
    assert (trainer.method.kind, trainer.method.temperature) == ("reverse_kl", 0.7)
    assert trainer.rollouts.producer.sampling.temperature == 0.7
    assert len(losses(trainer)) == 2


def test_what_distillation_does_not_use_is_refused():
    with pytest.raises(UserError, match="epsilon: a teacher is learned from"):
        upweight.DistillationConfig(epsilon=0.3)
