"""The doctor on configs: what would stop or spoil a run is found before it starts."""

import json
import shutil
import socket

from made_runs import write_config, write_model, write_online
from made_vllm import FakeVllm
from upweight.config import load_config
from upweight.doctor.config import check_config


def found(file, *overrides):
    """Findings of a config by what they are about; where there are several, the worst."""
    order = ("ok", "note", "warning", "alarm")
    return {
        one.what: one
        for one in sorted(check_config(load_config(file, list(overrides))), key=lambda f: order.index(f.level))
    }


def test_a_good_config_has_nothing_wrong(model_folder, tmp_path):
    checked = found(write_online(tmp_path, model_folder))
    assert not [one for one in checked.values() if one.wrong]
    assert checked["data"].says.startswith("8 rows to train on with the columns answer")
    assert checked["rewards"].says == "vowels (there, but not called: `upweight rewards CONFIG` tries them)"
    assert checked["memory"].evidence["needed_gib"] <= checked["memory"].evidence["there_gib"]


def test_a_learning_rate_far_from_the_usual_is_a_warning(model_folder, tmp_path):
    checked = found(write_online(tmp_path, model_folder), "learning_rate=0.1")["keys"]
    assert checked.level == "warning"
    assert checked.says.startswith("learning_rate: 0.1 is far above")


def test_pairs_whose_columns_are_named_for_the_other_role_are_a_warning(model_folder, tmp_path):
    form = {"field_prompt": "question", "field_chosen": "rejected", "field_rejected": "chosen"}
    entry = {"path": str(tmp_path / "pairs.jsonl"), "type": form}
    checked = found(write_config(tmp_path, model_folder, datasets=[entry]))["columns"]
    assert checked.level == "warning"
    assert "whose names say the opposite" in checked.says


def test_rewards_that_cannot_be_had_or_miss_a_column_are_named(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder)
    (tmp_path / "needy.py").write_text("def right(completions, gold):\n    return [0.0] * len(completions)\n")
    assert "nowhere" in found(file, "trl.reward_funcs=[nowhere.right]")["rewards"].says
    missing = found(file, "trl.reward_funcs=[needy.right]")["rewards"]
    assert missing.level == "alarm"
    assert "'gold'" in missing.says
    (tmp_path / "no_model").mkdir()
    assert "no_model" in found(file, "trl.reward_funcs=[no_model]")["rewards"].says


def test_packages_that_a_config_needs_are_looked_for(model_folder, tmp_path, monkeypatch):
    file = write_config(tmp_path, model_folder)
    monkeypatch.setattr("upweight.train.machine_checks._installed", lambda _: False)
    assert "pip install schedulefree" in found(file, "optimizer=schedule_free_adamw")["optimizer"].says
    assert "pip install wandb" in found(file, "wandb_project=x")["wandb_project"].says


def test_a_typo_in_the_columns_is_named_with_its_place(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"promt": "hello"}) + "\n")
    checked = found(file)["data"]
    assert checked.level == "alarm"
    assert "prompts.jsonl" in checked.says
    assert "'prompt'" in checked.says
    assert "Did you mean 'promt'? The row has promt. Add to datasets[0]" in checked.says
    assert "`type: {field_prompt: promt}`" in checked.says


def test_rows_that_are_left_out_and_prompts_that_do_not_fit_are_counted(model_folder, tmp_path):
    checked = found(write_config(tmp_path, model_folder, sequence_len=24, excess_length_strategy="drop"))
    assert checked["data"].level == "warning"
    assert "dropped" in checked["data"].says
    assert "sequence_len" in checked["data"].remedy
    (tmp_path / "filters.py").write_text(
        "from itertools import count\n\nnumbers = count()\n\n\ndef keep(row):\n    return next(numbers) % 2 == 0\n"
    )
    filtered = found(write_config(tmp_path, model_folder), "datasets.0.filter=filters.keep")["data"]
    assert (filtered.level, filtered.remedy) == ("note", "")  # its user has chosen so
    assert "left out by the filter" in filtered.says
    too_long = found(write_online(tmp_path, model_folder), "trl.max_completion_length=250")["lengths"]
    assert too_long.level == "alarm"
    assert "256 positions" in too_long.says
    assert "sequence_len" not in too_long.remedy


def test_rows_that_were_left_out_do_not_exceed_the_positions_of_the_model(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder)
    with (tmp_path / "pairs.jsonl").open("a") as rows:
        rows.write(json.dumps({"question": "long", "chosen": "a" * 500, "rejected": "b"}) + "\n")
    checked = found(file, "sequence_len=128")
    assert "lengths" not in checked
    assert checked["data"].level == "note"
    assert "longer than the 256 positions of the model" in checked["data"].remedy  # no sequence_len keeps that row
    kept = found(file, "sequence_len=600")["lengths"]
    assert (kept.level, kept.remedy) == ("alarm", "sequence_len: 256")


def test_a_model_that_is_not_there_is_told_once(tmp_path):
    checked = found(write_online(tmp_path, "nobody/nothing"))
    assert (checked["base_model"].level, checked["data"].level) == ("alarm", "note")
    assert checked["base_model"].says.startswith("could not load")
    assert checked["data"].says == "not checked, for the same cause as base_model"
    assert "memory" not in checked


def test_modules_of_an_adapter_are_looked_for_in_the_model(model_folder, tmp_path):
    keys = {"adapter": "lora", "lora_r": 4, "lora_target_modules": ["q_proj", "v_porj"]}
    file = write_config(tmp_path, model_folder, **keys)
    (wrong,) = [one for one in check_config(load_config(file)) if one.level == "alarm"]
    assert wrong.says.startswith("lora_target_modules: 'v_porj' matches nothing in the model. Did you mean 'v_proj'?")


def test_packages_that_stored_weights_need_are_named(model_folder, tmp_path):
    stored = tmp_path / "stored"
    shutil.copytree(model_folder, stored)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (stored / "config.json").write_text(json.dumps(config))
    checked = found(write_config(tmp_path, stored, adapter="lora", lora_target_linear=True))
    assert (checked["base_model"].level, checked["base_model"].remedy) == ("alarm", "pip install optimum gptqmodel")
    assert "gptq stores needs optimum and gptqmodel, which are not installed" in checked["base_model"].says


def test_a_folder_without_weights_is_found_before_training(model_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    checked = found(write_online(tmp_path, bare))
    assert checked["base_model"].level == "alarm"
    assert "has no weights" in checked["base_model"].says
    assert [one.what for one in checked.values() if one.wrong] == ["base_model"]
    for file in bare.glob("token*"):
        file.unlink()
    checked = found(write_online(tmp_path, bare))
    assert "no weights (*.safetensors) and no tokenizer" in checked["base_model"].says
    assert checked["data"].says == "not checked, for the same cause as base_model"


def test_a_model_that_is_too_large_is_told_before_it_is_loaded(tmp_path):
    large = write_model(tmp_path / "large")
    config = json.loads((large / "config.json").read_text())
    (large / "config.json").write_text(json.dumps({**config, "hidden_size": 65536, "intermediate_size": 2**20}))
    checked = found(write_online(tmp_path, large))["memory"]
    assert checked.level == "alarm"
    assert "will not fit" in checked.says
    assert "'adapter: lora'; 'adapter: qlora' with" in checked.remedy
    lean = found(write_online(tmp_path, large), "adapter=lora", "memory=lean")["memory"].remedy
    assert "'adapter: qlora'" in lean
    assert not [key for key in ("'adapter: lora'", "'memory: lean'") if key in lean]
    assert "upweight fits CONFIG" in checked.remedy
    keys = {"rl": "distill", "trl": None, "distill": {"teacher": str(large)}}
    taught = write_online(tmp_path, write_model(tmp_path / "small"), **keys)
    assert "; 'distill.teacher_load_in_4bit: true' or a smaller 'distill.teacher'; " in found(taught)["memory"].remedy


def test_the_server_has_to_answer_and_to_serve_the_model_with_room(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder)
    served = FakeVllm(model_folder)
    use = ["trl.use_vllm=true", f"trl.vllm_server_base_url={served.url}"]
    assert found(file, *use)["server"].level == "ok"
    several = f"trl.vllm_server_base_urls=[{served.url}, http://127.0.0.1:9]"
    assert "http://127.0.0.1:9 does not answer" in found(file, use[0], several)["server"].says
    assert "trl.use_vllm: false" in found(file, use[0], several)["server"].remedy
    served.longest = 16
    assert "vllm.max_model_len" in found(file, *use)["server"].remedy
    served.folder = tmp_path / "another"
    other = found(file, *use)["server"]
    assert other.level == "alarm"
    assert "another" in other.says
    served.close()
    gone = found(file, *use)["server"]
    assert gone.level == "alarm"
    assert "upweight vllm-serve" in gone.remedy


def test_a_folder_that_cannot_be_written_is_refused(model_folder, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert found(write_online(tmp_path, model_folder, output_dir=str(tmp_path / "file" / "out")))["output_dir"].wrong


def test_an_earlier_run_in_the_folder_is_mentioned(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 3}\n')
    checked = found(file)["output_dir"]
    assert (checked.level, "--resume" in checked.remedy, "--overwrite" in checked.remedy) == ("note", True, True)
    assert "it holds a run of 3 steps" in checked.says


def test_every_stage_is_looked_at_with_the_first_ones_model(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, rl=None)
    entry = file.read_text().split("datasets:")[1].split("\n")[1:]
    assert entry
    text = file.read_text() + "stages:\n- {name: one, rl: dpo}\n- {name: two, rl: ipo, sequence_len: 8}\n"
    file.write_text(text)
    checked = found(file)
    assert checked["stage-1-one: data"].level == "ok"
    assert checked["stage-2-two: data"].level == "alarm"


def test_environments_have_to_be_there(model_folder, tmp_path):
    file = write_online(tmp_path, model_folder)
    row = {"responses_create_params": {"input": [{"role": "user", "content": "count"}]}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    gym = ["nemo_gym_enabled=true", "nemo_gym_config_paths=[gym.yaml]", f"nemo_gym_dir={tmp_path}"]
    gym += ['nemo_gym_datasets=[{"path": "tasks.jsonl", "server_name": "counting"}]', "datasets=null"]
    assert found(file, *gym)["environment"].level == "ok"
    assert "clone it" in found(file, *gym, f"nemo_gym_dir={tmp_path / 'nowhere'}")["environment"].remedy
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert found(file, *gym, "nemo_gym_auto_start=false", f"nemo_gym_head_port={port}")["environment"].level == "alarm"
    (tmp_path / "counting.py").write_text(
        'def add(a: int) -> int:\n    """Add one.\n\n    Args:\n        a: it.\n    """\n'
    )
    assert found(file, "tools=[counting.add]")["rewards"].level == "ok"
    assert found(file, "tools=[counting.subtract]")["rewards"].level == "alarm"
