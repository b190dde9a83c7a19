import pytest
import torch
from transformers import AutoConfig

from made_runs import write_config, write_model, write_online
from upweight.cli.fits import run
from upweight.errors import UserError


def test_a_table_that_marks_the_configs_own_way(tmp_path, capsys):
    config = write_config(tmp_path, write_model(tmp_path / "model"), adapter="lora", gradient_checkpointing=True)
    run(str(config), [], memory=24)
    about, headings, *rows, _, advice = capsys.readouterr().out.splitlines()
    assert advice.startswith("It fits: ")
    assert "dpo, 512 tokens, 2 in a row; GiB of 24" in about
    assert headings.split()[:2] == ["trained", "recompute"]
    assert len(rows) == 6
    assert [row.split()[1:3] for row in rows if "*" in row] == [["lora", "yes"]]
    run(str(config), [], memory=1)
    *table, _, advice = capsys.readouterr().out.splitlines()
    assert all(row.split()[-2] == "no" for row in table[2:])
    assert advice.startswith("It does not fit")


def test_the_last_line_names_the_keys_that_make_it_fit(tmp_path, capsys):
    model = tmp_path / "large"
    AutoConfig.from_pretrained(
        write_model(tmp_path / "model"), hidden_size=4096, intermediate_size=14336, num_hidden_layers=24
    ).save_pretrained(model)
    for memory, overrides, says in (
        (80, ["sequence_len=1024"], "It fits: "),
        (9, ["sequence_len=1024"], "It does with 'adapter: qlora', 'load_in_4bit: true'"),
        (9, ["sequence_len=400000"], "tokens in place of 400000 (sequence_len)"),
        (2, [], "No way of training it on one such card does: take a smaller model"),
    ):
        run(str(model), overrides, memory=memory, method="sft")
        assert says in capsys.readouterr().out.splitlines()[-1], (memory, overrides)
    run(str(model), ["trl.max_completion_length=300"], memory=80, method="grpo")
    about, *_, advice = capsys.readouterr().out.splitlines()
    assert "grpo, 812 tokens" in about
    assert "(trl.max_completion_length and max_prompt_length)" in advice
    with pytest.raises(UserError, match="--method: the config chooses the method"):
        run(str(write_config(tmp_path, model)), [], memory=24, method="dpo")
    with pytest.raises(UserError, match="PPO needs a value model"):
        run(str(model), [], memory=24, method="ppo")


def beside_a_lora(capsys):
    """The first line, and the GiB that a LoRA's training takes beside weights and activations."""
    about, _, *rows, _, _ = capsys.readouterr().out.splitlines()
    return about, float(next(row for row in rows if row.split()[0] == "lora").split()[3])


def test_teachers_take_memory_as_they_are_loaded(tmp_path, capsys):
    student = write_model(tmp_path / "student")
    teacher = tmp_path / "teacher"
    AutoConfig.from_pretrained(student, hidden_size=8192, intermediate_size=8192).save_pretrained(teacher)
    config = write_online(tmp_path, student, rl="distill", trl=None, distill={"teacher": str(teacher)})
    run(str(config), [], memory=24)
    about, whole = beside_a_lora(capsys)
    assert "teachers of 0.8 GiB" in about
    run(str(config), ["distill.teacher_load_in_4bit=true"], memory=24)
    assert beside_a_lora(capsys)[1] < 0.4 * whole
    run(str(config), ["reference_offloading=true"], memory=24)
    assert beside_a_lora(capsys)[1] < 0.1
    run(str(config), ["distill.teacher=http://localhost:1", "distill.top_k=20"], memory=24)
    assert "teachers" not in beside_a_lora(capsys)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says by itself how much memory it has")
def test_without_a_gpu_the_memory_has_to_be_said(tmp_path):
    with pytest.raises(UserError, match="--memory 24"):
        run(str(write_config(tmp_path, tmp_path)), [], memory=None)
