"""Runs whose teacher has another tokenizer: they learn, go on where they stopped, and name what is not possible."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from made_runs import largest_difference, metrics_of, write_model, write_online
from made_tokenizers import byte_tokenizer, spaced_tokenizer
from tiny_models import tiny
from upweight.config.load import load_config
from upweight.errors import UserError
from upweight.train.run import build, evaluate, train

WORDS = ["the fox", "a dog", "the lazy dog", "brown", "they", "over", "a fox jumps", "again"]
CHATS = [
    {"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w * 2}]} for w in WORDS
]
OTHER = ["they say that a fox and the dogs answered: maths is 2 + 3, so say it again and again, user"] * 4
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("s", "a"), ("sa", "y"), ("▁", "say"), ("o", "x"), ("f", "ox")]


def write_teacher(folder, tokenizer):
    tokenizer.save_pretrained(folder)
    model = tiny("llama", vocab_size=len(tokenizer), num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    model.save_pretrained(folder)


@pytest.fixture
def models(tmp_path):
    write_model(tmp_path / "student", num_hidden_layers=1)
    write_teacher(tmp_path / "bytes", byte_tokenizer("llama3", corpus=OTHER))
    write_teacher(tmp_path / "spaced", spaced_tokenizer(MERGES))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return tmp_path


def config(folder, teacher, block=None, **keys):
    content = {
        "base_model": str(folder / "student"), "rl": "distill", "chat_template": "chatml",
        "datasets": [{"path": str(folder / "rows.jsonl")}], "learning_rate": 2e-2, "micro_batch_size": 8,
        "max_steps": 3, "logging_steps": 1, "save_strategy": "no", "trl": {"max_completion_length": 8},
        "distill": {"teacher": str(folder / teacher), "align": "text", **(block or {})},
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    if (block or {}).get("on_policy") == 0:
        del content["trl"]
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return load_config(folder / "config.yaml")


def logged(folder):
    return [line for line in metrics_of(folder) if "loss" in line]


@pytest.mark.parametrize("teacher", ["bytes", "spaced"])
@pytest.mark.parametrize("block", [{"on_policy": 0}, {"on_policy": 0.5, "ce_coef": 0.1}, {"temperature": 2.0}], ids=str)
def test_runs_of_every_data_kind_log_what_is_compared(models, teacher, block):
    train(config(models, teacher, block, val_set_size=2, eval_steps=3))
    lines = metrics_of(models / "out")
    first = logged(models / "out")[0]
    assert 0.2 < first["distill/aligned_share"] <= 1
    assert 0 < first["distill/teacher_tail_mass"] < 1
    assert 0 < first["distill/tail_mass"] < 1
    assert first["distill/unread_share"] < 0.9
    assert "distill/teacher_gain" not in first
    held_out = next(line for line in lines if "eval_loss" in line)
    assert held_out["eval_distill/divergence"] > 0


@pytest.mark.parametrize(("teacher", "on_policy"), [("bytes", 0), ("spaced", 0), ("bytes", 1)])
def test_a_student_comes_closer_to_a_teacher_with_another_tokenizer(models, teacher, on_policy):
    train(config(models, teacher, {"on_policy": on_policy}, max_steps=25))
    values = [line["distill/divergence"] for line in logged(models / "out")]
    assert values[-1] < 0.6 * values[0]


def test_a_run_that_goes_on_has_the_same_weights(models):
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    train(config(models, "bytes", {"on_policy": 0.5}, **keys))
    whole = load_file(models / "out" / "model.safetensors")
    (models / "out" / "model.safetensors").unlink()
    train(config(models, "bytes", {"on_policy": 0.5}, **keys), resume=str(models / "out" / "checkpoint-2"))
    assert largest_difference(load_file(models / "out" / "model.safetensors"), whole) == 0


def test_the_key_changes_nothing_for_a_teacher_with_the_same_tokenizer(models):
    write_model(models / "same", num_hidden_layers=2, hidden_size=16)
    block = {"on_policy": 0}
    with_key = evaluate(config(models, "same", block, val_set_size=4))
    without = evaluate(config(models, "same", {**block, "align": None}, val_set_size=4))
    assert with_key["eval_loss"] == without["eval_loss"]
    assert "eval_distill/aligned_share" not in with_key


def test_without_the_key_the_refusal_names_it(models):
    with pytest.raises(UserError, match=r"another tokenizer than the student: .*Set 'distill\.align: text'"):
        train(config(models, "bytes", {"on_policy": 0, "align": None}))


def test_several_teachers_have_tokenizers_of_their_own(models):
    write_model(models / "same", num_hidden_layers=2, hidden_size=16)
    rows = [{**row, "teacher_id": ("a", "b", "c")[n % 3]} for n, row in enumerate(CHATS)]
    (models / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {name: str(models / folder) for name, folder in zip("abc", ("bytes", "spaced", "same"), strict=True)}
    train(config(models, "bytes", {"teacher": None, "teachers": places, "on_policy": 0, "ce_coef": 0.1}))
    assert 0.2 < logged(models / "out")[0]["distill/aligned_share"] <= 1


def advantages_of(models, **trl):
    """The trainer of a run whose advantages a teacher with another tokenizer gives, after its first rollout."""
    file = write_online(models, models / "student")
    content = yaml.safe_load(file.read_text())
    content["trl"] = {"max_completion_length": 12, "teacher_kl_coef": 0.5, "temperature": 1.0, **trl}
    content["distill"] = {"teacher": str(models / "bytes"), "align": "text"}
    file.write_text(yaml.safe_dump(content))
    trainer = build(load_config(file))
    trainer.model.eval()
    trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    return trainer


def token_logps(model, ids):
    ids, zero = torch.as_tensor(ids), torch.zeros(1)
    log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).detach()
    return torch.cat([zero, log_p.gather(1, ids[1:, None])[:, 0]]).numpy()


def test_the_advantage_of_a_span_is_the_teachers_log_prob_over_the_samplers(models):
    trainer = advantages_of(models, num_generations=1)
    teacher, student = (AutoModelForCausalLM.from_pretrained(models / name) for name in ("bytes", "student"))
    aligner = trainer.runner.teachers.by_name[None].aligner
    spans_seen, total, tokens = 0, 0.0, 0
    for unit in trainer.rollouts.units:
        (sample,) = unit.samples
        found, spans = aligner.alignment(sample)
        theirs, ours = token_logps(teacher, found), token_logps(student, sample.ids)
        right = np.zeros(len(sample.ids))
        for (start, end), (first, after), same in zip(
            spans.student_2M.T, spans.teacher_2M.T, spans.same_M, strict=True
        ):
            if same and sample.loss_mask[start]:
                right[start:end] = 0.5 * (theirs[first:after].sum() - ours[start:end].sum())
                spans_seen += end - start > 1 or after - first > 1
                total += right[start] / 0.5
        tokens += int(sample.loss_mask.sum())
        np.testing.assert_allclose(sample.token_advantages, right[sample.loss_mask], atol=3e-4)
    assert spans_seen
    metrics = trainer.runner.meters.drain(trainer.accelerator)
    assert metrics["distill/sampled_kl"] == pytest.approx(-total / tokens, abs=1e-4)
    trainer.rollouts.close()
