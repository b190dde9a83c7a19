"""Every offline method trains from a config to the end, learns its rows, and resumes."""

import json

import pytest
from safetensors.torch import load_file

from made_runs import metrics_of, write_config
from upweight.config import load_config
from upweight.train.run import train

TEXTS = [{"text": f"the quick brown fox number {n % 4} jumps over the lazy dog"} for n in range(16)]
STEPS = [
    {"prompt": f"question {n % 4}", "completions": ["the fox jumps", "the dog sleeps"], "labels": [n % 2 == 0, True]}
    for n in range(16)
]
LABELLED = [
    {"question": f"question {n % 5}", "completion": "the lazy dog" if n % 2 else "a fox", "label": bool(n % 2)}
    for n in range(16)
]
CONFIGS = {
    "sft": ({}, TEXTS, {"type": "completion", "field": "text"}),
    "dpo": ({"rl": "dpo", "gradient_checkpointing": True}, None, None),
    "dpo losses": ({"rl": "dpo", "dpo_loss_type": ["sigmoid", "aot"], "dpo_loss_weights": [1.0, 0.5]}, None, None),
    "ipo": ({"rl": "ipo", "rl_beta": 1.0}, None, None),
    "kto": ({"rl": "kto"}, LABELLED, {"type": "chatml.intel"}),
    "orpo": ({"rl": "orpo"}, None, None),
    "simpo": ({"rl": "simpo"}, None, None),
    "orm": ({"reward_model": True}, None, None),
    "prm": ({"process_reward_model": True}, STEPS, {"type": "stepwise_supervised"}),
}
ADAPTERS = {
    "full": {},
    "lora": {"adapter": "lora", "lora_target_linear": True, "lora_r": 4},
    "dora": {"adapter": "lora", "lora_target_modules": ["q_proj", "v_proj"], "peft_use_dora": True, "lora_r": 4},
}


def config_of(name, folder, model_folder, **keys):
    method, rows, entry = CONFIGS[name]
    if rows is not None:
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys["datasets"] = [{"path": str(file), **entry}]
    keys = {
        "rl": None,
        "num_epochs": 3,
        "learning_rate": 1e-2,
        "save_steps": 8,
        "disable_dropout": True,
        **method,
        **keys,
    }
    return write_config(folder, model_folder, **keys)


WHOLE, FAST = ("dpo", "kto", "prm", "sft"), ("dpo", "orm")  # without and with an adapter, in `make test`
CASES = [
    *(pytest.param(name, "full", marks=[] if name in WHOLE else pytest.mark.slow) for name in CONFIGS),
    *(pytest.param(name, "lora", marks=[] if name in FAST else pytest.mark.slow) for name in CONFIGS),
    pytest.param("dpo", "dora", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_a_method_learns_and_resumes(name, adapter, model_folder, tmp_path):
    file, out = config_of(name, tmp_path, model_folder, **ADAPTERS[adapter]), tmp_path / "out"
    train(load_config(file))
    lines = metrics_of(out)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    (result,) = out.glob("*model.safetensors")
    assert result.name == ("model.safetensors" if adapter == "full" else "adapter_model.safetensors")
    weights = load_file(result)
    for folder in out.glob("checkpoint-*"):
        if folder.name != "checkpoint-8":
            (folder / "whole.json").unlink()
    train(load_config(file), resume=True)
    assert metrics_of(out) == lines
    assert all(bool((load_file(result)[key] == value).all()) for key, value in weights.items())


def test_kto_tells_held_out_pairs_apart(model_folder, tmp_path):
    keys = {"rl": "kto", "learning_rate": 1e-2, "num_epochs": 4, "val_set_size": 4, "eval_on_start": True}
    train(load_config(write_config(tmp_path, model_folder, **keys)))
    found = [line["eval_rewards/accuracies"] for line in metrics_of(tmp_path / "out") if "eval_loss" in line]
    assert (found[0], found[-1]) == (0.0, 1.0)
    assert not any("rewards/accuracies" in line for line in metrics_of(tmp_path / "out"))
