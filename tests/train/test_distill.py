import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from made_runs import metrics_of, on_ranks, rows_for, trainer_for, write_model
from made_tokenizers import byte_tokenizer
from tiny_models import SHAPES, tiny
from upweight.config.load import load_config
from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.methods import Distill
from upweight.models.reference import SeparateModel
from upweight.train.distill.load import require_same_vocabulary
from upweight.train.distill.log import write_log
from upweight.train.distill.teachers import LocalTeacher, LoggedTeacher, Teachers
from upweight.train.run import build, evaluate, train

OFFLINE = Distill(on_policy=0, divergence="jsd", beta=0.3, temperature=1.5, ce_coef=0.2)


def teacher_model(seed=1, **changes):
    model = tiny("qwen3", num_hidden_layers=1, hidden_size=16, **changes)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def teachers_of(method, *names, **changes):
    """What `make_policy` loads teachers by: one without a name, or one for each name."""

    def load(policy, engine, attach_engine):
        by_name = {}
        for number, name in enumerate(names or [None]):
            model = teacher_model(number + 1, **changes)
            by_name[name] = LocalTeacher(method, SeparateModel(policy, model), attach_engine(model), 89)
        return Teachers(by_name)

    return {"load_teachers": load}


def plain_loss(method, model, teachers, rows):
    """The loss of rows, each sequence forwarded alone by both models, whole distributions in float64."""
    total, ce, tokens = 0.0, 0.0, 0
    for unit in units_of(rows, method):
        (sample,) = unit.samples
        at = np.flatnonzero(sample.loss_mask)
        at = torch.from_numpy(at[at > 0])
        ids = torch.from_numpy(sample.ids)
        z = model(input_ids=ids[None], use_cache=False).logits[0, at - 1].double()
        with torch.no_grad():
            v = teachers[unit.teacher](input_ids=ids[None], use_cache=False).logits[0, at - 1].double()
        log_q, log_p = (z / method.temperature).log_softmax(-1), (v / method.temperature).log_softmax(-1)
        if method.top_k is not None:
            ids_TK = log_p.topk(method.top_k).indices
            log_q, log_p = log_q.gather(1, ids_TK), log_p.gather(1, ids_TK)
            if method.tail == "renormalise":
                log_q, log_p = log_q.log_softmax(-1), log_p.log_softmax(-1)
            if method.tail == "bucket":
                log_q, log_p = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (log_q, log_p))
        p, q = log_p.exp(), log_q.exp()
        if method.kind == "forward_kl":
            total = total + (p * (log_p - log_q)).sum()
        elif method.kind == "reverse_kl":
            total = total + (q * (log_q - log_p)).sum()
        else:
            log_m = (method.beta * p + (1 - method.beta) * q).log()
            total = total + (method.beta * p * (log_p - log_m) + (1 - method.beta) * q * (log_q - log_m)).sum()
        ce = ce - z.log_softmax(-1).gather(1, ids[at][:, None]).sum()
        tokens += len(at)
    return (method.coef * total + method.ce_coef * ce) / tokens


LISTS = [
    Distill(on_policy=0, divergence=kind, top_k=5, tail=tail, temperature=t)
    for kind in ("forward_kl", "reverse_kl", "jsd")
    for tail, t in (("bucket", 1.0), ("bucket", 1.7), ("renormalise", 1.7), ("drop", 1.0))
]
WHOLE = [OFFLINE, *(Distill(on_policy=0, divergence=kind) for kind in ("forward_kl", "reverse_kl", "jsd"))]


@pytest.mark.parametrize("method", [*WHOLE, *LISTS], ids=lambda m: f"{m.divergence} {m.top_k} {m.tail} {m.temperature}")
def test_loss_and_gradient_are_those_of_whole_distributions(method, tmp_path):
    rows = rows_for(method)
    trainer = trainer_for(method, tmp_path, rows=rows, batch=len(rows), budget=40, parts=teachers_of(method))
    (inputs,) = list(trainer.get_train_dataloader())
    loss = trainer.runner.train(trainer.model, inputs["units"])
    ours = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    right = plain_loss(method, trainer.model, {None: teacher_model(1)}, rows)
    right.backward()
    assert float(loss) == pytest.approx(float(right), abs=1e-5, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
    held_out, counts = trainer.runner.evaluate(trainer.model, inputs["units"])
    total = sum(float(held_out.sums[name] / counts[name]) for name in counts)
    assert total == pytest.approx(float(right), abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("top_k", [None, 4])
def test_rows_are_compared_with_the_teacher_that_they_name(top_k, tmp_path):
    method = Distill(on_policy=0, top_k=top_k)
    rows = [{**row, "teacher_id": "ab"[n % 2]} for n, row in enumerate(rows_for(method))]
    trainer = trainer_for(
        method, tmp_path, rows=rows, batch=len(rows), budget=60, parts=teachers_of(method, "a", "b", vocab_size=95)
    )
    (inputs,) = list(trainer.get_train_dataloader())
    loss = trainer.runner.train(trainer.model, inputs["units"])
    models = {name: teacher_model(n + 1, vocab_size=95) for n, name in enumerate("ab")}
    for model in models.values():  # rows that pad the teachers' vocabulary are no tokens
        model.lm_head.weight.data = model.lm_head.weight.data[:89]
    assert float(loss) == pytest.approx(float(plain_loss(method, trainer.model, models, rows)), abs=1e-5)
    inputs["units"][0] = replace(inputs["units"][0], teacher="c")
    with pytest.raises(UserError, match=r"names the teacher 'c'; distill.teachers has a, b"):
        trainer.runner.train(trainer.model, inputs["units"])


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_the_student_are_rows_of_a_teacher_without_trees(shape, tmp_path):
    method = Distill(on_policy=0)
    units = SHAPES[shape]()
    losses = []
    for layout in ("tree", "padded"):
        trainer = trainer_for(method, tmp_path, parts=teachers_of(method))
        trainer.runner.teachers.by_name[None].engine.layout = layout
        losses.append(trainer.runner.train(trainer.model, units))
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)


def two_ranks(folder):
    method = OFFLINE
    trainer = trainer_for(method, folder, parts=teachers_of(method), batch=4, max_steps=2)
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path):
    (tmp_path / "two").mkdir()
    on_ranks(two_ranks, 2, tmp_path / "two")
    trainer = trainer_for(OFFLINE, tmp_path / "one", parts=teachers_of(OFFLINE), batch=8, max_steps=2)
    trainer.train()
    there = json.loads((tmp_path / "two" / "log.json").read_text())
    for one, other in zip(trainer.state.log_history[:2], there[:2], strict=True):
        for name in ("loss", "grad_norm", "distill/forward_kl", "distill/agreement"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


def write_config(folder, rows, **keys):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "base_model": str(folder / "student"), "rl": "distill", "datasets": [{"path": str(folder / "rows.jsonl")}],
        "chat_template": "chatml", "learning_rate": 1e-2, "micro_batch_size": 4, "max_steps": 3, "logging_steps": 1,
        "save_strategy": "no",
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return load_config(file)


@pytest.fixture
def models(tmp_path):
    write_model(tmp_path / "student", num_hidden_layers=1)
    write_model(tmp_path / "teacher", num_hidden_layers=2, hidden_size=16)
    return tmp_path


CHATS = [
    {"messages": [{"role": "user", "content": f"say {c}"}, {"role": "assistant", "content": c * 3}]} for c in "abcdefgh"
]
TEXTS = [{"prompt": f"say {c}:", "completion": f" {c}{c}"} for c in "abcdefgh"]
PROMPTS = [{"prompt": f"say {c}:"} for c in "abcdefgh"]


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        (CHATS, {"on_policy": 0}),
        (CHATS, {"on_policy": 0.5, "ce_coef": 0.1, "top_k": 8}),
        (CHATS, {"on_policy": 1}),
        (TEXTS, {"on_policy": 0, "divergence": "forward_kl"}),
        (TEXTS, {"on_policy": 0.5, "divergence": "jsd"}),
        (PROMPTS, {"temperature": 2.0}),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_runs_of_every_data_kind_log_the_loss_on_held_out_rows(models, rows, keys):
    config = write_config(
        models, rows, distill={"teacher": str(models / "teacher"), **keys}, trl={"max_completion_length": 6},
        val_set_size=2, eval_steps=3,
    )  # fmt: skip
    assert config.method.online == (keys.get("on_policy", 1) > 0)
    train(config)
    lines = metrics_of(models / "out")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3
    held_out = [line for line in lines if "eval_loss" in line]
    assert held_out
    assert held_out[-1]["eval_distill/forward_kl"] > 0
    assert {"distill/agreement", "distill/cross_entropy", "entropy"} <= next(
        line for line in lines if "loss" in line
    ).keys()


def test_a_student_comes_closer_to_its_teacher(models):
    keys = {"distill": {"teacher": str(models / "teacher")}, "trl": {"max_completion_length": 8}, "micro_batch_size": 8}
    config = write_config(models, CHATS, max_steps=25, learning_rate=2e-2, **keys)
    train(config)
    values = [line["distill/reverse_kl"] for line in metrics_of(models / "out") if "loss" in line]
    assert values[-1] < 0.6 * values[0]


def test_an_adapter_of_the_same_base_is_a_teacher(models):
    base = tiny("llama", num_hidden_layers=1, vocab_size=len(byte_tokenizer("chatml")))
    base = type(base).from_pretrained(models / "student")
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(models / "adapter")
    config = write_config(models, TEXTS, distill={"teacher": str(models / "adapter"), "on_policy": 0}, val_set_size=4)
    assert evaluate(config)["eval_loss"] > 1e-4
    (models / "copy").symlink_to(models / "student")
    same = write_config(models, TEXTS, distill={"teacher": str(models / "copy"), "on_policy": 0}, val_set_size=4)
    assert evaluate(same)["eval_loss"] == pytest.approx(0, abs=1e-5)


def test_an_offloaded_teacher_teaches_the_same(models):
    keys = {"distill": {"teacher": str(models / "teacher"), "on_policy": 0}, "val_set_size": 4}
    here = evaluate(write_config(models, TEXTS, **keys))
    there = evaluate(write_config(models, TEXTS, **keys, reference_offloading=True))
    assert here["eval_loss"] == there["eval_loss"]


def test_another_tokenizer_is_refused_by_name(models):
    student = byte_tokenizer("chatml")
    other = byte_tokenizer("chatml")
    require_same_vocabulary(student, other, "distill.teacher: there")
    student.add_tokens(["<extra>"])
    with pytest.raises(
        UserError, match=r"there has another tokenizer.*1 tokens differ \('<extra>' is \d+ here and missing"
    ):
        require_same_vocabulary(student, other, "distill.teacher: there")


def test_rows_keep_the_name_of_their_teacher(models):
    rows = [{**row, "teacher_id": "ab"[n % 2]} for n, row in enumerate(TEXTS)]
    places = {"a": str(models / "teacher"), "b": str(models / "student")}
    config = write_config(models, rows, distill={"teachers": places, "on_policy": 0}, val_set_size=4)
    assert evaluate(config)["eval_loss"] > 1e-3
    only = {"a": str(models / "teacher")}
    with pytest.raises(UserError, match=r"names the teacher 'b'; distill.teachers has a"):
        evaluate(write_config(models, rows, distill={"teachers": only, "on_policy": 0}, val_set_size=4))


LOGGED = {"kd_trainer": True, "kd_ce_alpha": 0.1, "kd_alpha": 0.9, "kd_temperature": 1.0}


@pytest.mark.parametrize("legacy", [True, False])
def test_axolotls_rows_of_logged_log_probs_are_learned_from(models, legacy):
    chats = []
    for number, row in enumerate(CHATS):
        lists = [[(10 + number, -0.5), (20, -9999.0), (30, -1.5)]] * 3  # of the last three tokens
        logged = {"logprobs": [[{"token": f"token_id:{t}", "logprob": p} for t, p in one] for one in lists]}
        if not legacy:
            logged = {"logprobs": [[p for _, p in one] for one in lists]}
            logged["target_token_ids"] = [[t for t, _ in one] for one in lists]
        chats.append({**row, **logged})
    config = write_config(models, chats, rl=None, **LOGGED, plugins=["axolotl.integrations.kd.KDPlugin"])
    entry = {"path": str(models / "rows.jsonl"), "type": "axolotl.integrations.kd.chat_template"}
    keys = {**LOGGED, "datasets": [{**entry, "logprobs_field": "logprobs"}], "val_set_size": 2}
    config = write_config(models, chats, rl=None, **keys)
    method = config.method
    assert (method.kind, method.tail, method.coef, method.ce_coef) == ("forward_kl", "drop", 0.9, 0.1)
    assert method.temperature_squared
    train(config)
    first = next(line for line in metrics_of(models / "out") if "loss" in line)
    assert first["distill/teacher_tail_mass"] > 0
    assert first["loss"] == pytest.approx(0.9 * first["distill/divergence"] + 0.1 * first["distill/ce_loss"], rel=1e-3)


def test_a_list_that_a_teacher_logged_teaches_as_the_teacher_does(tmp_path):
    method = Distill(on_policy=0, top_k=5, tail="bucket")
    rows, teacher = rows_for(method), teacher_model(1)
    logged = []
    for row in rows:
        log_p = teacher(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1).detach()
        best = log_p.roll(1, 0).topk(5)  # the list of a token is that of the one before it, which predicts it
        lists = {"teacher_ids": best.indices.tolist(), "teacher_logps": best.values.tolist()}
        logged.append({**row, **lists})
    losses = []
    for data, parts in (
        (rows, teachers_of(method)),
        (logged, {"load_teachers": lambda *_: Teachers({None: LoggedTeacher(method)})}),
    ):
        trainer = trainer_for(method, tmp_path, rows=data, batch=len(rows), budget=40, parts=parts)
        (inputs,) = list(trainer.get_train_dataloader())
        losses.append(trainer.runner.train(trainer.model, inputs["units"]))
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="a row has no teacher_ids"):
        trainer.runner.train(trainer.model, units_of(rows, method))


def test_the_teacher_writes_what_the_student_does_not(models):
    block = {"teacher": str(models / "teacher"), "on_policy": 0.5, "seq_kd": True, "ce_coef": 0.5}
    config = write_config(models, PROMPTS, distill=block, trl={"max_completion_length": 6}, micro_batch_size=8)
    train(config)
    first = next(line for line in metrics_of(models / "out") if "loss" in line)
    assert first["distill/ce_loss"] > 0


def test_a_log_of_a_teacher_replaces_it(models):
    block = {"on_policy": 0, "top_k": 6, "divergence": "forward_kl"}
    with_teacher = write_config(
        models, TEXTS, distill={"teacher": str(models / "teacher"), **block}, micro_batch_size=8
    )
    tokens = write_log(with_teacher, models / "teacher.parquet")
    assert tokens == 8 * 4  # a space, two letters and the end token
    train(with_teacher)
    right = [line["loss"] for line in metrics_of(models / "out") if "loss" in line]
    keys = {"datasets": [{"path": str(models / "teacher.parquet")}], "output_dir": str(models / "logged")}
    train(write_config(models, TEXTS, distill={"teacher": "logged", **block}, micro_batch_size=8, **keys))
    found = [line["loss"] for line in metrics_of(models / "logged") if "loss" in line]
    assert found == pytest.approx(right, rel=2e-3)


HINTED = [{**row, "answer": row["completion"]} for row in TEXTS]
HINTS = """
def hint(row):
    return f"{row['prompt']} (it is{row['answer']})"
"""


@pytest.mark.parametrize("weights", ["initial", "live", "ema"])
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_policy_learns_from_itself_with_a_hint(models, weights, adapter):
    (models / "hints.py").write_text(HINTS)
    sees = "hints.hint" if weights == "live" else "{prompt} (it is{answer})"
    block = {"teacher": "self", "self_weights": weights, "privileged_prompt": sees, "on_policy": 0.5, "ema_rate": 0.5}
    keys = {} if adapter is None else {"adapter": adapter, "lora_target_linear": True}
    config = write_config(models, HINTED, distill=block, trl={"max_completion_length": 5}, **keys)
    trainer = build(config)
    inputs = trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
    trainer.runner.train(trainer.model, inputs["units"])
    metrics = trainer.runner.meters.drain(trainer.accelerator)
    total, tokens = 0.0, 0
    for unit in inputs["units"]:
        (sample,) = unit.samples
        length, seen = unit.teacher_prompt
        completion = sample.ids[length:]
        text = trainer.processing_class.decode(seen)
        assert "(it is" in text
        logs = []
        for prompt in (sample.ids[:length], seen):
            ids = torch.from_numpy(np.concatenate([prompt, completion]))
            logits = trainer.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
            logs.append(logits.double().log_softmax(-1).detach())
        total += float((logs[0].exp() * (logs[0] - logs[1])).sum())
        tokens += len(completion)
    assert metrics["distill/reverse_kl"] == pytest.approx(total / tokens, abs=1e-4)
    assert total > 1e-3
    trainer.rollouts.close()


def test_an_average_of_the_policy_follows_it(models):
    block = {"teacher": "self", "self_weights": "ema", "privileged_prompt": "{prompt} or {answer}", "ema_rate": 0.5}
    config = write_config(
        models, HINTED, distill=block, trl={"max_completion_length": 5}, save_strategy="steps", save_steps=2
    )
    train(config)
    assert (models / "out" / "checkpoint-2" / "reference.safetensors").is_file()
    with pytest.raises(UserError, match="columns of the row in braces"):
        train(write_config(models, HINTED, distill={**block, "privileged_prompt": "{nothing}"}))
