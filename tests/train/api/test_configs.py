import importlib
import importlib.util
import logging
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig
from transformers import HfArgumentParser

import upweight
from upweight import (
    CPOConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    PRMConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)
from upweight.errors import UserError
from upweight.log import _warned
from upweight.methods import DPO, METHODS
from upweight.train.api.as_config import build_config
from upweight.train.arguments import training_arguments
from upweight.train.objects import Objects

CONFIGS = (SFTConfig, DPOConfig, KTOConfig, ORPOConfig, CPOConfig, RewardConfig, PRMConfig)


def seen_by_the_loop(args, peft_config=None):
    config = build_config(args, Objects(arguments=args, peft_config=peft_config))
    return training_arguments(config, args, steps_per_epoch=1, use_cpu=True)


def test_import_stays_light():
    code = "import sys, upweight; assert 'SFTTrainer' in dir(upweight); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_trainer_loads_what_it_needs_and_not_the_others():
    code = "import sys; from upweight import GRPOTrainer; sys.exit('upweight.train.api.distill' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there():
    assert [name for name in upweight.__all__ if getattr(upweight, name).__name__ != name] == []


@pytest.mark.parametrize(
    ("name", "instead"),
    [("PPOTrainer", "GRPOTrainer and RLOOTrainer"), ("OnlineDPOTrainer", "GRPOTrainer"),
     ("clone_chat_template", "chat_template_path"), ("RichProgressCallback", "leave it out")],
)  # fmt: skip
def test_names_of_trl_that_are_not_here_have_an_answer(name, instead):
    with pytest.raises(ImportError, match=f"upweight has no {name}: .*{instead}"):
        exec(f"from upweight import {name}")


@pytest.mark.parametrize("module", ["experimental.orpo", "trainer.dpo_config", "data_utils"])
def test_modules_of_trl_are_answered_with_where_their_names_are(module):
    with pytest.raises(ModuleNotFoundError, match=r"no upweight\..*: .* becomes `from upweight import ORPOTrainer`"):
        importlib.import_module(f"upweight.{module}")
    assert importlib.util.find_spec("upweight.nothing") is None


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ImportError, match=r"no 'SFTTrainr'\. Did you mean 'SFTTrainer'"):
        exec("from upweight import SFTTrainr")
    exec("from upweight import rewards, user_modules")  # modules are no names that are missing


@pytest.mark.parametrize(
    ("kind", "argument", "instead"),
    [(GRPOConfig, "overwrite_output_dir", "Leave it out"), (DPOConfig, "logging_dir", "TENSORBOARD_LOGGING_DIR"),
     (GRPOConfig, "vllm_guided_decoding_regex", "'vllm_structured_outputs_regex' now"),
     (DPOConfig, "label_pad_token_id", "Leave it out"), (SFTConfig, "wandb_project", "WANDB_PROJECT"),
     (DPOConfig, "max_completion_length", "Remove it and set 'max_length'"),
     (RLOOConfig, "rloo_k", "'num_generations'"), (SFTConfig, "group_by_length", "Leave it out"),
     (SFTConfig, "zzz", "`upweight docs api`")],
)  # fmt: skip
def test_arguments_of_old_scripts_have_an_answer(kind, argument, instead, tmp_path):
    with pytest.raises(TypeError, match=f"takes no argument '{argument}'. .*{instead}"):
        kind(output_dir=tmp_path, **{argument: 1})


def test_names_of_trl_can_be_asked_for():
    assert not hasattr(upweight, "create_reference_model")
    assert getattr(upweight, "PPOTrainer", None) is None
    with pytest.raises(AttributeError, match=r"no create_reference_model: leave `ref_model` out"):
        upweight.create_reference_model  # noqa: B018 # pyright: ignore


def test_unknown_names_are_attribute_errors():
    with pytest.raises(ImportError):
        from upweight import NothingTrainer  # noqa: F401 # pyright: ignore


@pytest.mark.parametrize("config", [*CONFIGS, GRPOConfig])
def test_a_command_line_can_be_read_into_a_config(config, tmp_path):
    words = ["--output_dir", str(tmp_path), "--learning_rate", "1e-5", "--use_liger_kernel"]
    (args,) = HfArgumentParser(config).parse_args_into_dataclasses(words)
    assert (args.learning_rate, args.use_liger_kernel) == (1e-5, True)
    assert args.method() == config(output_dir=tmp_path).method()


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_those_of_the_method(config, tmp_path):
    args = config(output_dir=tmp_path, max_steps=None)
    method = METHODS[args.method_class.name]()
    kept = {"loss_type": "sigmoid"} if config is CPOConfig else {}
    assert args.method() == method.model_copy(update=kept)
    assert args.max_steps == -1
    assert args.max_length == 1024
    assert args.gradient_checkpointing is False
    assert args.logging_steps == 10


def test_settings_reach_the_method_under_their_own_names(tmp_path):
    args = DPOConfig(
        output_dir=tmp_path, loss_type="ipo", f_divergence_type="js_divergence", f_alpha_divergence_coef=0.3, beta=0.5
    )
    assert args.method() == DPO(loss_type=("ipo",), divergence="js_divergence", divergence_alpha=0.3, beta=0.5)
    assert CPOConfig(output_dir=tmp_path, cpo_alpha=0.0).method().nll_weight == 0
    assert RewardConfig(output_dir=tmp_path, center_rewards_coefficient=None).method().center_rewards_coefficient == 0


def test_an_argument_we_lack_is_refused_by_the_dataclass(tmp_path):
    with pytest.raises(TypeError, match="rpo_alpha"):
        DPOConfig(output_dir=tmp_path, rpo_alpha=1.0)  # pyright: ignore


def test_bad_values_are_named_as_the_script_names_them(tmp_path):
    with pytest.raises(UserError, match="DPOConfig: f_divergence_type"):
        DPOConfig(output_dir=tmp_path, f_divergence_type="kl")
    with pytest.raises(UserError, match="loss_weights"):
        DPOConfig(output_dir=tmp_path, loss_weights=[1.0, 2.0])


@pytest.mark.parametrize(
    "asked",
    [
        {"truncation_mode": "keep_end"},
        {"auto_find_batch_size": True},
        {"accelerator_config": {"split_batches": True}},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
        {"label_smoothing_factor": 0.1},
        {"fp16": True, "bf16": True},
        {"gradient_accumulation_steps": 0},
        {"per_device_train_batch_size": 0},
    ],
)
def test_what_would_be_ignored_is_refused(asked, tmp_path):
    with pytest.raises(UserError, match=next(iter(asked))):
        DPOConfig(output_dir=tmp_path, **asked)


def test_noise_on_embeddings_is_for_sft(tmp_path):
    args = SFTConfig(output_dir=tmp_path, neftune_noise_alpha=5.0)
    assert seen_by_the_loop(args).neftune_noise_alpha is None  # the stock hook would come on top
    with pytest.raises(UserError, match="neftune_noise_alpha"):
        DPOConfig(output_dir=tmp_path, neftune_noise_alpha=5.0)


def test_what_holds_by_construction_says_so_once(tmp_path, caplog):
    _warned.clear()
    with caplog.at_level(logging.WARNING, "upweight"):
        for _ in range(2):
            SFTConfig(output_dir=tmp_path, packing=True, packing_strategy="bfd", padding_free=False)
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == ["packing"]


def test_arguments_without_effect_say_so_and_have_none(tmp_path, caplog):
    _warned.clear()
    with caplog.at_level(logging.WARNING, "upweight"):
        args = SFTConfig(output_dir=tmp_path, include_num_input_tokens_seen=True)
    assert args.include_num_input_tokens_seen == "no"
    assert "`num_tokens` is in every log" in caplog.text


def test_no_tracker_is_what_none_asks_for(tmp_path):
    assert SFTConfig(output_dir=tmp_path, report_to=None).report_to == []


def test_the_trainer_sees_one_batch_a_step_and_the_script_what_it_said(tmp_path):
    args = DPOConfig(output_dir=tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True)
    seen = seen_by_the_loop(args)
    assert (seen.per_device_train_batch_size, seen.gradient_accumulation_steps) == (8, 1)
    assert not seen.bf16
    assert seen.mixed_precision == "no"
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.bf16) == (2, 4, True)


def test_the_learning_rate_follows_method_and_adapter_unless_set(tmp_path):
    args = DPOConfig(output_dir=tmp_path)
    assert [seen_by_the_loop(args, lora).learning_rate for lora in (None, LoraConfig())] == [1e-6, 5e-6]
    assert seen_by_the_loop(DPOConfig(output_dir=tmp_path, learning_rate=0.0), LoraConfig()).learning_rate == 0
    assert torch.device("cpu") == DPOConfig(output_dir=tmp_path, use_cpu=True).device


def test_alphapo_is_simpo_without_a_likelihood_term(tmp_path):
    method = CPOConfig(output_dir=str(tmp_path), loss_type="alphapo", alpha=0.5, simpo_gamma=0.2).method()
    assert (method.loss_type, method.nll_weight, method.alpha, method.gamma) == ("simpo", 0.0, 0.5, 0.2)


def test_what_settings_refuse_together_is_said_in_the_words_of_scripts(tmp_path):
    with pytest.raises(UserError, match=r"precompute_ref_log_probs: .*the argument.*'loss_type=\"apo_zero_unpaired\"'"):
        KTOConfig(output_dir=str(tmp_path), precompute_ref_log_probs=True)


@pytest.mark.parametrize(
    ("report_to", "says"),
    [("tensorboard", "report_to='tensorboard': the tracker is not installed: pip install tensorboard, or leave it out"),
     (["azure_ml"], "pip install azureml-sdk"), ("flyte", "pip install flytekit"), ("swanlab", 'install "swanlab<0.8"'),
     ("tensorbord", "report_to: 'tensorbord' is not a tracker. Did you mean 'tensorboard'?"),
     ("mine", "report_to: 'mine' is not a tracker. One of azure_ml, ")],
)  # fmt: skip
def test_a_tracker_that_is_not_there_is_refused_before_a_model_is_loaded(report_to, says, tmp_path, monkeypatch):
    monkeypatch.setattr("upweight.train.machine_checks._installed", lambda _: False)
    with pytest.raises(UserError) as error:
        SFTConfig(output_dir=str(tmp_path), report_to=report_to)
    assert says in str(error.value)
    assert SFTConfig(output_dir=str(tmp_path), report_to="none").report_to == []
