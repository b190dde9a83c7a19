import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from upweight import (
    DPOConfig,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from upweight.errors import UserError


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("trust_remote_code", r"read `training_args\.trust_remote_code`"),
        ("torch_dtype", "called `dtype` now"),
        ("xyzzy", r"'ModelConfig' object has no attribute 'xyzzy'$"),
    ],
)
def test_attributes_of_older_scripts_say_where_they_are_now(name, answer):
    with pytest.raises(AttributeError, match=answer):
        getattr(ModelConfig(), name)


# As TRL's own examples are written, but for the import.
SCRIPT = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from upweight import (
    ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_kbit_device_map, get_peft_config,
    get_quantization_config,
)

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    model_kwargs = dict(revision=model_args.model_revision, dtype=model_args.dtype)
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        model_kwargs |= dict(device_map=get_kbit_device_map(), quantization_config=quantization_config)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **model_kwargs)
    dataset = load_dataset("json", data_files=script_args.dataset_name, streaming=script_args.dataset_streaming)
    trainer = SFTTrainer(
        model=model, args=training_args, train_dataset=dataset[script_args.dataset_train_split],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
"""


def parsed(*words, kinds=(ScriptArguments, SFTConfig, ModelConfig), **options):
    return TrlParser(kinds).parse_args_and_config(words, **options)


@pytest.mark.slow
def test_a_script_with_a_command_line_and_a_file_trains(model_folder, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one and one", "completion": " two"}\n' * 8)
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model_folder}\nuse_peft: true\nlora_target_modules: [all-linear]\nlora_r: 4\n"
        "max_steps: 5\nlearning_rate: 1e-3\nreport_to: none\nuse_cpu: true\nsave_strategy: 'no'\n"
    )
    words = ["--config", "run.yaml", "--dataset_name", "rows.jsonl", "--output_dir", "out", "--max_steps", "2"]
    root = Path(__file__).parents[3]
    around = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}  # commands set it
    run = subprocess.run(
        [sys.executable, "script.py", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**around, "PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "2/2" in run.stderr + run.stdout


def test_words_go_before_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_FILE", "before")
    file = tmp_path / "run.yaml"
    file.write_text(
        "env: {OF_THE_FILE: 3}\nlearning_rate: 1e-5\nlora_r: 4\nuse_peft: true\nbf16: false\ndataset_name: trained\n"
        "model_init_kwargs: {attn_implementation: eager}\n"
    )
    script, training, model = parsed("--lora_r", "8", f"--config={file}", "--output_dir", str(tmp_path / "out"))
    assert (script.dataset_name, training.learning_rate, training.bf16) == ("trained", 1e-5, False)
    assert training.model_init_kwargs == {"attn_implementation": "eager"}
    assert (model.lora_r, model.use_peft) == (8, True)
    assert os.environ["OF_THE_FILE"] == "3"


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, GRPOConfig])
def test_an_empty_command_line_gives_defaults(config, tmp_path):
    script, training, model = parsed("--output_dir", str(tmp_path), kinds=(ScriptArguments, config, ModelConfig))
    assert (script, model) == (ScriptArguments(), ModelConfig())
    assert training.method() == config(output_dir=str(tmp_path)).method()


def test_a_file_gives_what_is_required(tmp_path):
    @dataclass
    class Needs:
        size: int

    file = tmp_path / "a.yaml"
    file.write_text("size: 3\n")
    assert parsed("--config", str(file), kinds=(Needs,)) == (Needs(3),)
    assert TrlParser(Needs).parse_args_and_config(["--size", "4"]) == (Needs(4),)


def test_unknown_arguments_are_named_or_returned(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("lora_ranks: 3\n")
    with pytest.raises(UserError, match=r"--lora_ranks 3: no such argument\. Did you mean 'lora_r"):
        parsed("--config", str(file), kinds=(ModelConfig,))
    model, rest = parsed("--other", "--config", str(file), kinds=(ModelConfig,), return_remaining_strings=True)
    assert (model, rest) == (ModelConfig(), ["--other", "--lora_ranks", "3"])
    assert parsed("--other", kinds=(ModelConfig,), fail_with_unknown_args=False) == (ModelConfig(),)
    assert TrlParser(ModelConfig).set_defaults_with_config(lora_r=2, other=1) == ["--other", "1"]


def test_bad_files_and_fields_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.yaml: cannot be read"):
        parsed("--config", str(tmp_path / "gone.yaml"))
    with pytest.raises(UserError, match="--config: name a YAML file"):
        parsed("--config")
    (tmp_path / "a.yaml").write_text("env: [a]\n")
    with pytest.raises(UserError, match="env: must map names"):
        parsed("--config", str(tmp_path / "a.yaml"))

    @dataclass
    class Clash:
        config: str = ""

    with pytest.raises(UserError, match=r"Clash\.config: `--config` names the YAML file"):
        TrlParser([Clash])


def test_adapters_and_quantisation_of_a_script():
    assert get_peft_config(ModelConfig()) is None
    lora = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["all-linear"], use_rslora=True, lora_r=3))
    assert lora is not None
    assert (lora.target_modules, lora.r, lora.use_rslora, lora.lora_dropout) == ("all-linear", 3, True, 0.05)
    two = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["q_proj", "v_proj"]))
    assert two is not None
    assert two.target_modules == {"q_proj", "v_proj"}
    assert get_quantization_config(ModelConfig()) is None
    eight = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert eight is not None
    assert eight.load_in_8bit
    four = get_quantization_config(ModelConfig(load_in_4bit=True, dtype="float16", use_bnb_nested_quant=True))
    assert four is not None
    assert (four.bnb_4bit_compute_dtype, four.bnb_4bit_use_double_quant) == (torch.float16, True)
    with pytest.raises(UserError, match="both are set"):
        ModelConfig(load_in_4bit=True, load_in_8bit=True)
    assert (get_kbit_device_map() is None) == (not torch.cuda.is_available())
