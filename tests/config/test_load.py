"""One file in, a checked config out; every error at once, each with its place and a remedy."""

import re
from pathlib import Path

import pytest

from upweight.config import load_config, parse_config
from upweight.config.peers import TABLES
from upweight.config.view import yaml_content
from upweight.errors import UserError
from upweight.methods import METHODS

WHOLE = {"base_model": "some/model", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}


def parse(content, *, fragment=False):
    return parse_config(content, folder=Path(), fragment=fragment)


def errors_of(content, *, fragment=False):
    with pytest.raises(UserError) as caught:
        parse(content, fragment=fragment)
    return str(caught.value).splitlines()


def test_a_whole_config_is_read_into_its_sections():
    config = parse({**WHOLE, "rl": "dpo", "rl_beta": 0.3, "learning_rate": "5e-6", "adapter": "lora", "lora_r": 8,
                    "lora_target_linear": True})  # fmt: skip
    assert config.method.name == "dpo"
    assert config.method.model_dump()["beta"] == 0.3
    assert config.optim.learning_rate == 5e-6
    assert (config.adapter.kind, config.adapter.rank) == ("lora", 8)
    assert config.data.datasets[0].type == "chatml.intel"


def test_a_model_beside_the_config_is_used_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "configs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "configs" / "a.yaml"
    file.write_text("base_model: model\ndatasets: [{path: rows.jsonl, type: chatml.intel}]\nrl: dpo\n")
    config = load_config(file)
    assert config.model.base_model == str(tmp_path / "configs" / "model")
    assert any("base_model: model is not in this folder, but beside the config" in one for one in config.notices)
    (tmp_path / "model").mkdir()
    assert load_config(file).model.base_model == "model"
    with pytest.raises(UserError, match="255 bytes"):
        load_config(file, ["base_model=" + "x" * 5000])


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse({**WHOLE, "rl": "dpo"}).optim.seed = 3


def test_all_errors_come_at_once_with_path_reason_and_suggestion():
    found = errors_of(
        {
            "base_model": "m",
            "rl": "grpo",
            "num_generations": 4,
            "trl": {"num_generation": 4, "beta": "much", "epsilon": -1, "reward_funcs": ["r.f"]},
            "datasets": [{"pat": "x", "path": "y"}, {"path": "z", "type": {"field_promt": "p"}}],
        }
    )
    assert found == [
        "num_generations: belongs under 'trl'",
        "trl.num_generation: unknown key. Did you mean 'num_generations'?",
        "datasets[0].pat: unknown key. Did you mean 'path'?",
        "datasets[1].type.field_promt: unknown key. Did you mean 'field_prompt'?",
        "trl.beta: expected a number, got 'much'.",
        "trl.epsilon: must be at least 0, got -1",
    ]


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"datasets": [{"path": "x", "typ": "alpaca"}, {"path": ""}]},
         ["datasets[0].typ: unknown key. Did you mean 'type'?", "datasets[1].path: is empty. Name a path, or drop"]),
        ({"rl": "grpo", "trl": {"reward_func": ["length"]}, "batch_size": 7, "micro_batch_size": 2},
         ["trl.reward_func: unknown key. Did you mean 'reward_funcs'?", "batch_size: 7 is not a multiple of micro_"]),
        ({"rl": "ebft", "ebfd": {"mode": "structured"}}, ["ebfd: unknown key. Did you mean 'ebft'?"]),
        ({"rll": "dpo", "rl_beta": 0.1}, ["rll: unknown key. Did you mean 'rl'?"]),
        ({"val_set_sizes": 2, "load_best_model_at_end": True, "save_strategy": "best"}, ["val_set_sizes: unknown"]),
    ],
)  # fmt: skip
def test_rules_are_tried_beside_unknown_keys_and_accuse_no_key_that_was_likely_meant(keys, found):
    errors = errors_of({**WHOLE, "datasets": [{"path": "x"}], **keys})
    assert len(errors) == len(found)
    assert all(error.startswith(one) for error, one in zip(errors, found, strict=True))


def test_a_mistyped_method_is_the_only_error_of_a_config_that_fits_the_one_that_was_meant():
    (error,) = errors_of({**WHOLE, "rl": "DPO"})
    assert error.endswith("got 'DPO'. Did you mean 'dpo'?")


def test_resuming_from_the_last_checkpoint_may_be_written_as_for_transformers():
    config = parse({"resume_from_checkpoint": True}, fragment=True)
    assert config.run.auto_resume
    assert "resume_from_checkpoint: is called 'auto_resume_from_checkpoints' here" in config.notices
    assert parse({"resume_from_checkpoint": False}, fragment=True).run.resume_from is None


def test_the_optimizers_of_torchao_have_axolotls_names_too():
    config = parse({"optimizer": "ao_adamw_8bit"}, fragment=True)
    assert config.optim.optimizer == "adamw_torch_8bit"
    assert "optimizer: 'ao_adamw_8bit' is called 'adamw_torch_8bit' here" in config.notices


def test_names_of_other_methods_have_an_advice_that_names_what_is_here():
    for name, advice in TABLES["methods"].items():
        assert name not in METHODS or name in ("sft", "orm", "prm")  # which `rl` does not take
        named = re.findall(r"'rl: (\w+)'", advice)
        assert all(one in METHODS for one in named)
        assert named or "reward_model: true" in advice or name == "sft"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"trl": {"learning_rate": 1e-5}}, "trl.learning_rate: belongs at the top level"),
        ({"split": "train"}, "split: belongs under 'datasets[...]'"),
        ({"rl": "dpo", "loss_type": "ipo"}, "with 'rl: dpo' it is 'dpo_loss_type'"),
        ({"rl": "dpo", "beta": 0.1}, "for preferences it is 'rl_beta'"),
        ({"rl": "dpoo"}, "Did you mean 'dpo'?"),
        ({"rl": "ppo"}, "PPO needs a value model, which is not here. 'rl: grpo' learns from the same rewards"),
        ({"rl": "DR-GRPO"}, "Write 'rl: grpo' with 'trl: {loss_type: dr_grpo}'."),
        ({"rl": "sft"}, "Leave 'rl' out"),
        ({"trl": {"vllm_device": "cuda:1"}}, "trl.vllm_device: set CUDA_VISIBLE_DEVICES where"),
        ({"use_teacher_server": True}, "use_teacher_server: give the server's URL as `distill.teacher`"),
        ({"lr": "dpo"}, "lr: unknown key. Did you mean 'rl'?"),
        ({"bnb_4bit_quant_type": "nf4"}, "bnb_4bit_quant_type: an option of bitsandbytes: write it under `bnb_config"),
        ({"lora_rank": 8}, "lora_rank: unknown key. Did you mean 'lora_r'?"),
        ({"rl": "reward_trainer"}, "rl: expected one of"),
        ({"adapter": "none"}, "adapter: expected one of lora, qlora, got 'none'. Leave it out for none."),
        ({"bf16": "maybe"}, "bf16: expected true or false or auto, got 'maybe'."),
        ({"micro_batch_size": True}, "micro_batch_size: expected a whole number, got true."),
        ({"micro_batch_size": 0}, "micro_batch_size: must be greater than 0, got 0"),
        ({"micro_batch_size": 1.5}, "micro_batch_size: expected a whole number, got 1.5."),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number, got nan."),
        ({"trl": 3}, "trl: expected a mapping of keys, got 3"),
        ({"datasets": {"path": "x"}}, "datasets: expected a list, got {'path': 'x'}."),
        ({"datasets": {"path": "x"}}, "Begin each entry with '- '"),
        ({"datasets": ["x"]}, "datasets[0]: expected a mapping, got 'x'. Write {path: x}."),
        ({"datasets": "x"}, "datasets: expected a list, got 'x'. Write [{path: x}]."),
        ({"trl": {"reward_funcs": "r.f"}}, "trl.reward_funcs: expected a list, got 'r.f'. Write ['r.f']."),
        ({"wandb_name": True}, "wandb_name: expected text, got true. Put it in quotes."),
        ({"datasets": [{"path": "x", "field_prompt": "p"}]}, "datasets[0].field_prompt: belongs under 'type'"),
        ({"fsdp_config": {"state_dict_type": "FULL_STATE_DIC"}}, "Did you mean 'FULL_STATE_DICT'?"),
        ({"seed": 16**5000}, "must be below 4.29497e+09, got a number of more than 60 digits"),
        ({"nothing_like_it": 1}, "nothing_like_it: unknown key. `upweight docs config` lists them all."),
        ({"optimizer": "adamw_torch_fusd"}, "Did you mean 'adamw_torch_fused'?"),
        ({1: 2}, "1: unknown key."),
        ({"special_tokens": {"pad": "x"}}, "special_tokens.pad: unknown key. Did you mean 'pad_token'?"),
        (
            {"rl": "dpo", "kto_desirable_weight": 1.0},
            "kto_desirable_weight: needs rl: kto; this config has rl: dpo",
        ),
        (
            {"rl": "grpo", "rl_beta": 0.1, "trl": {"beta": 0.2}},
            "contradicts 'rl_beta', which means the same. Keep one.",
        ),
        ({"dpo_beta": 0.1, "rl_beta": 0.2, "rl": "dpo"}, "contradicts 'rl_beta', which means the same. Keep only"),
        (
            {"fsdp_config": {"use_min_params": 9}},
            "fsdp_config.use_min_params: unknown key. Did you mean 'min_num_params'?",
        ),
        ({"x-usual": {"type": "alpaca"}}, "If it only holds a YAML anchor, define that where it is first used."),
        ({"relora": True}, "relora: not supported; leave it out to train all weights, or with `adapter: lora`"),
        ({"sweep": "sweep.yml"}, "sweep: `upweight sweep CONFIG learning_rate=1e-5,1e-4` trains every combination"),
        ({"spectrum_top_fraction": 0.5}, "name the weights to train in `unfrozen_parameters`"),
        ({"added_tokens_overrides": {300: "<mine>"}}, "name new tokens in `tokens`"),
        (
            {"accelerator_config": {"split_batches": True}},
            "accelerator_config: 'split_batches' is not supported; 'micro",
        ),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "accelerator_config: 'num_steps' is not supported",
        ),
        ({"accelerator_config": 3}, "accelerator_config: '3' is not supported"),
        ({"rl": "dpo", "dpo_loss_type": "kto"}, "dpo_loss_type: expected a list of sigmoid, hinge, ipo, "),
        ({"plugins": ["some.Plugin"]}, "plugins: 'some.Plugin' is not supported."),
        ({"flash_attention": True, "flex_attention": True}, "flash_attention and flex_attention are set. Keep one."),
        ({"flash_attention": True, "attn_implementation": "sdpa"}, "flash_attention and attn_implementation are set."),
    ],
)
def test_what_is_wrong_is_said(content, expected):
    assert expected in "\n".join(errors_of(content, fragment=True))


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_a_key_we_do_not_have_may_ask_for_nothing(value):
    assert parse({"relora": value, "use_otel_metrics": value}, fragment=True).notices == ()


def test_null_means_unset():
    config = parse({"rl": "grpo", "trl": {"max_completion_length": None, "loss_type": "dr_grpo"}}, fragment=True)
    assert config.method.model_dump()["max_completion_length"] == 256


def test_keys_that_hold_by_construction_are_noted_once():
    config = parse({"sample_packing": True, "trl": {"use_liger_loss": True}, "strict": False}, fragment=True)
    assert [notice.partition(":")[0] for notice in config.notices] == ["sample_packing", "trl.use_liger_loss"]
    together = parse({"liger_rope": True, "liger_rms_norm": True}, fragment=True).notices
    assert together == ("liger_rope, liger_rms_norm: nothing to do: the engine picks its kernels",)


def test_where_axolotl_counts_packs_it_is_said_that_rows_are_counted():
    (notice,) = parse({"sample_packing": True}, fragment=True).notices
    assert "'micro_batch_size' counts rows, where Axolotl counts packs of 'sequence_len' tokens" in notice
    for others in ({"rl": "dpo"}, {"reward_model": True}):
        (notice,) = parse({"sample_packing": True} | others, fragment=True).notices
        assert notice.startswith("sample_packing: nothing to do: ")
    assert parse({"sample_packing": False}, fragment=True).notices == ()


def test_options_of_accelerate_that_change_no_number_are_noted():
    asked = {"even_batches": True, "gradient_accumulation_kwargs": {"sync_each_batch": True}, "split_batches": False}
    (notice,) = parse({"accelerator_config": asked}, fragment=True).notices
    assert notice == "accelerator_config: nothing to do: a step is one batch, which the ranks divide by its tokens"


def test_older_spellings_are_mapped_and_noted():
    config = parse(
        {
            "rl": "dpo",
            "dpo_beta": 0.2,
            "sdp_attention": True,
            "evaluation_strategy": "no",
            "fsdp": ["full_shard", "auto_wrap"],
            "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
        },
        fragment=True,
    )
    assert config.method.model_dump()["beta"] == 0.2
    assert config.model.attention == "sdpa"
    assert config.run.eval_strategy == "no"
    assert (config.sharding.wrap_layers, config.sharding.reshard) == ("Block", False)
    assert [notice.partition(":")[0] for notice in config.notices] == [
        "fsdp_config",
        "fsdp_config.sharding_strategy",
        "dpo_beta",
        "evaluation_strategy",
        "sdp_attention",
    ]


def test_a_value_of_another_trainer_is_named_as_it_was_written():
    (notice,) = parse({"torch_compile": "auto"}, fragment=True).notices
    assert notice.startswith("torch_compile: 'auto' compiles attention and head")
    (notice,) = parse({"gradient_checkpointing": "unsloth"}, fragment=True).notices
    assert notice == "gradient_checkpointing: 'unsloth' is called 'activation_offloading: true' here"


def test_a_name_of_another_trainer_is_not_called_old():
    config = parse({"optim": "sgd", "evaluation_strategy": "no"}, fragment=True)
    assert config.optim.optimizer == "sgd"
    assert config.notices == (
        "evaluation_strategy: is now called 'eval_strategy'",
        "optim: is called 'optimizer' here",
    )


@pytest.mark.parametrize(
    ("content", "section", "name", "value"),
    [
        ({"per_device_train_batch_size": 3}, "optim", "micro_batch_size", 3),
        ({"num_train_epochs": 5}, "optim", "num_epochs", 5),
        ({"save_strategy": False}, "run", "save_strategy", "no"),
        ({"wandb_watch": False}, "tracking", "wandb_watch", "false"),
        ({"wandb_mode": False}, "tracking", "wandb_mode", "disabled"),
        ({"evals_per_epoch": 0, "saves_per_epoch": 0, "max_steps": -1}, "run", "saves_per_epoch", None),
        ({"tensor_parallel_size": 1, "dp_replicate_size": 1, "expert_parallel_size": 1}, "sharding", "fsdp", False),
        ({"gradient_checkpointing": "offload"}, "optim", "activation_offloading", True),
        ({"attn_implementation": "kernels/some"}, "model", "attention", None),
        ({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}},
         "sharding", "reshard", True),
        ({"peft": {"loftq_config": {"loftq_bits": None}}}, "adapter", "kind", None),
        ({"tokens": {"pad_token": "<p>"}}, "model", "new_tokens", []),
        ({"datasets": [{"path": "x", "train_on_split": "test"}]}, "data", "test_datasets", []),
        ({"chat_template": "qwen3_5"}, "data", "chat_template", "tokenizer_default"),
    ],
)  # fmt: skip
def test_ways_that_others_write_it(content, section, name, value):
    assert getattr(getattr(parse(content, fragment=True), section), name) == value


def test_a_run_folder_may_lie_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse({"output_dir": "~/runs/a"}, fragment=True).run.output_dir == "/home/me/runs/a"


def test_overrides_reach_nested_keys_and_list_items(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("base_model: m\nrl: grpo\ntrl: {reward_funcs: [r.f]}\ndatasets: [{path: a}]\n")
    config = load_config(file, ["trl.beta=0.01", "micro_batch_size=2", "datasets.0.path=b", "datasets[0].split=test"])
    assert config.method.model_dump()["beta"] == 0.01
    assert config.optim.micro_batch_size == 2
    assert (config.data.datasets[0].path, config.data.datasets[0].split) == ("b", "test")


@pytest.mark.parametrize(
    "override", ["trl.beta", "=3", "datasets.7.path=x", "base_model.x=1", "seed=[", "datasets.x=1"]
)
def test_bad_overrides_are_user_errors(tmp_path, override):
    file = tmp_path / "c.yaml"
    file.write_text("base_model: m\ndatasets: [{path: a}]\n")
    with pytest.raises(UserError):
        load_config(file, [override])


def test_learning_rate_follows_the_method_and_the_adapter():
    def rate(**keys):
        return parse({**WHOLE, **keys}, fragment=True).optim.learning_rate

    assert rate() == 2e-5
    assert rate(rl="dpo") == 1e-6
    assert rate(rl="dpo", adapter="lora") == 5e-6
    assert rate(rl="grpo", adapter="lora") == 1e-5
    assert rate(rl="grpo", adapter="lora", learning_rate=3e-4) == 3e-4


def test_a_fragment_needs_no_required_keys_and_a_whole_config_does():
    parse({"rl": "grpo"}, fragment=True)
    assert errors_of({"rl": "grpo"}) == [
        "base_model: missing. Name the model to train: a hub id or a folder.",
        "datasets: missing. List what to train on.",
        "trl.reward_funcs: missing. A group of completions is compared by rewards: name at least one.",
    ]


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"torch_dtype": "bfloat16", "bf16": "auto"}, "bf16", True),
        ({"torch_dtype": "torch.float32"}, "bf16", False),
        ({"float16": True}, "fp16", True),
        ({"float16": True, "fp16": False, "bf16": False}, "fp16", True),
        ({"float16": False}, "fp16", False),
    ],
)
def test_precision_as_other_trainers_write_it(given, key, value):
    config = parse_config({"base_model": "m", "datasets": [{"path": "d"}], **given}, folder=Path())
    assert getattr(config.model, key) is value


def test_the_lowest_rate_of_a_cosine_schedule():
    optim = parse({**WHOLE, "rl": "dpo", "eta_min": 1e-6}).optim
    assert (optim.scheduler, optim.scheduler_args) == ("cosine_with_min_lr", {"min_lr": 1e-6})
    with pytest.raises(UserError, match="eta_min: is for 'lr_scheduler: cosine'"):
        parse({**WHOLE, "rl": "dpo", "eta_min": 1e-6, "lr_scheduler": "linear"})


def test_answers_as_axolotl_names_them():
    held = {**WHOLE, "rl": "dpo", "val_set_size": 2}
    run = parse({**held, "generate_samples": True, "num_generation_samples": 5, "generation_do_sample": True}).run
    assert (run.answered_prompts, run.answer_tokens, run.answer_temperature) == (5, 128, 0.7)
    run = parse({**held, "generate_samples": True, "generation_do_sample": False, "generation_temperature": 0.9}).run
    assert (run.answered_prompts, run.answer_temperature) == (3, 0.0)
    run = parse({**held, "eval_table_size": 2, "eval_max_new_tokens": 16}).run
    assert (run.answered_prompts, run.answer_tokens, run.generate_samples) == (2, 16, False)
    off = {"generate_samples": False, "num_generation_samples": 5, "generation_do_sample": True}
    assert parse({**held, **off, "eval_max_new_tokens": 16}).run.answered_prompts == 0


@pytest.mark.parametrize("given", ["c4", {"path": "c4"}, [{"path": "c4", "type": "pretrain"}]])
def test_pretraining_data_are_datasets(given):
    (entry,) = parse({"base_model": "m", "pretraining_dataset": given, "max_steps": 5}).data.datasets
    assert (entry.path, entry.type) == ("c4", "pretrain")
    with pytest.raises(UserError, match="'datasets' is set too"):
        parse({"base_model": "m", "datasets": [{"path": "c4"}], "pretraining_dataset": given})


@pytest.mark.parametrize("given", [{"torch_dtype": "bfloat16", "bf16": False}, {"torch_dtype": "int3"}, {"float16": 3}])
def test_precisions_that_contradict_or_mean_nothing_are_refused(given):
    with pytest.raises(UserError, match=r"torch_dtype|float16"):
        parse_config({"base_model": "m", "datasets": [{"path": "d"}], **given}, folder=Path())


def test_a_config_that_names_the_better_answer_is_read_again_as_a_run_writes_it():
    form = {"field_winner": "w", "winner_values": {"A": "a", "B": "b", "tie": None}}
    config = parse({**WHOLE, "rl": "dpo", "datasets": [{"path": "rows.csv", "type": form}]})
    assert parse(yaml_content(config)).data == config.data


def test_a_path_may_be_text(tmp_path):
    (tmp_path / "my.yaml").write_text("base_model: some/model\ndatasets: [{path: rows.jsonl}]\n")
    assert load_config(str(tmp_path / "my.yaml"), ["learning_rate=1e-5"]).optim.learning_rate == 1e-5
