"""What a user reads where a teacher cannot teach: it is the student, it is worse, or it does not fit."""

import json
import logging

import pytest
import yaml

from made_runs import metrics_of, write_model
from made_tokenizers import byte_tokenizer
from upweight.config.load import load_config
from upweight.errors import UserError
from upweight.runs.health import verdicts
from upweight.train.distill.load import warn_of_other_template
from upweight.train.run import build, evaluate, train

TEXTS = [{"prompt": f"say {c}:", "completion": f" {c}{c}"} for c in "abcdefgh"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def models(tmp_path):
    write_model(tmp_path / "student", num_hidden_layers=1)
    write_model(tmp_path / "teacher", num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    (tmp_path / "copy").symlink_to(tmp_path / "student")
    return tmp_path


def config(folder, block=None, **keys):
    content = {
        "base_model": str(folder / "student"), "datasets": [{"path": str(folder / "rows.jsonl")}],
        "learning_rate": 1e-2, "micro_batch_size": 8, "max_steps": 1, "logging_steps": 1, "save_strategy": "no",
        **({"trl": {"max_completion_length": 6}} if block and block.get("on_policy") else {}),
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"),
        **({"rl": "distill", "distill": {"on_policy": 0, **block}} if block else {}), **keys,
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return load_config(folder / "config.yaml")


@pytest.mark.parametrize("block", [{}, {"divergence": "forward_kl"}, {"divergence": "jsd"}, {"on_policy": 1}])
def test_a_student_that_is_its_teacher_is_told_so_at_the_first_step(models, block):
    with pytest.raises(UserError, match="the student equals its teacher at every token of the first step"):
        train(config(models, {"teacher": str(models / "copy"), **block}))
    with pytest.raises(UserError, match=r"distill\.teacher: is the base_model itself"):
        config(models, {"teacher": str(models / "student"), **block})


def test_a_student_that_differs_from_its_teacher_by_rounding_is_a_verdict(models):
    train(config(models, {"teacher": str(models / "copy"), "top_k": 5}, max_steps=25, learning_rate=1e-6))
    (verdict,) = verdicts([line for line in metrics_of(models / "out") if "loss" in line])
    assert verdict.name == "nothing left to learn from the teacher"
    assert "began as the same model" in verdict.line()
    # Other terms train a student that begins as its teacher.
    train(config(models, {"teacher": str(models / "student"), "ce_coef": 1.0}))


def test_a_teacher_that_is_worse_than_its_student_is_a_verdict(models):
    train(config(models, max_steps=30, output_dir=str(models / "taught")))
    block = {"teacher": str(models / "student")}
    train(config(models, block, base_model=str(models / "taught"), max_steps=55, learning_rate=1e-5))
    lines = [line for line in metrics_of(models / "out") if "loss" in line]
    assert max(line["distill/teacher_gain"] for line in lines) < -0.05
    assert "teacher is worse" in [verdict.name for verdict in verdicts(lines)]


def test_another_chat_template_is_a_warning_that_shows_both(caplog):
    student, teacher = byte_tokenizer("chatml"), byte_tokenizer("chatml")
    with caplog.at_level(logging.WARNING):
        warn_of_other_template(student, teacher, "distill.teacher: there")  # neither has one
        student.chat_template = teacher.chat_template = CHATML
        warn_of_other_template(student, teacher, "distill.teacher: there")
        assert not caplog.records
        teacher.chat_template = "{% for m in messages %}Q: {{ m.content }}{% endfor %}"
        warn_of_other_template(student, teacher, "distill.teacher: there")
    assert "distill.teacher: there has another chat template: it knows 'Q: Hello', and is shown '<|im_start|>user" in (
        caplog.text
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_teacher_teaches_nearly_as_the_whole_one(models, bits):
    pytest.importorskip("bitsandbytes")  # `make test-quant`
    block = {"teacher": str(models / "teacher")}
    whole = evaluate(config(models, block, val_set_size=4))
    packed = {**block, f"teacher_load_in_{bits}bit": True}
    found = evaluate(config(models, packed, val_set_size=4))
    assert found["eval_loss"] == pytest.approx(whole["eval_loss"], rel=0.3)
    assert found["eval_loss"] != whole["eval_loss"]
    train(config(models, packed, max_steps=12, learning_rate=2e-2))
    losses = [line["loss"] for line in metrics_of(models / "out") if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_teacher_needs_a_package_that_is_named(models, bits):
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"distill\.teacher_load_in_8bit: a quantised teacher needs bitsandbytes"):
            train(config(models, {"teacher": str(models / "teacher"), f"teacher_load_in_{bits}bit": True}))


def test_a_teacher_that_writes_is_checked_once(models):
    block = {"teacher": str(models / "teacher"), "on_policy": 0.5, "seq_kd": True}
    trainer = build(config(models, block))
    writer, samplers = trainer.rollouts.producer.completion_source.teacher, []
    for _ in range(2):
        trainer.rollouts.current = None
        trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
        samplers.append(writer.kept)
    trainer.rollouts.close()
    assert samplers[0] is samplers[1]
    assert samplers[0] is not None
