"""What cannot be done yet is said before anything is loaded, all of it at once."""

import pytest

from upweight.config import parse_config
from upweight.errors import UserError
from upweight.train.refuse import UNSUPPORTED, refuse_unsupported, require_optimizer

BASE = {"base_model": "tiny", "rl": "dpo", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True}
ASKED = {
    "load_in_8bit": {"fsdp": True, "adapter": "lora", "load_in_8bit": True, "lora_target_linear": True},
    "bnb_config_kwargs.bnb_4bit_quant_storage": {"deepspeed": "zero3.json", **QLORA,
                                                 "bnb_config_kwargs": {"bnb_4bit_quant_storage": "uint8"}},
    "rl_adapter_ref_model": {"fsdp": True, "adapter": "lora", "rl_adapter_ref_model": True},
    "precompute_ref_log_probs": {"fsdp": True, "precompute_ref_log_probs": True},
    "fsdp, deepspeed, fp16": {"deepspeed": "zero2.json", "fp16": True, "bf16": False},
    "optimizer": {"fsdp": True, "optimizer": "paged_adamw_8bit"},
    "save_only_model": {"fsdp_config": {"version": 2}, "save_only_model": True},
    "fsdp_config.final_state_dict_type": {"fsdp_config": {"final_state_dict_type": "SHARDED_STATE_DICT"}},
    "fsdp_config.auto_wrap_policy": {"fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9}},
    "sync_ref_model": {"deepspeed": "zero2.json", "sync_ref_model": True},
    "deepspeed, context_parallel_size": {"deepspeed": "zero2.json", "context_parallel_size": 2},
    "trl.vllm_lora_sync": {"fsdp": True, "adapter": "lora", "lora_target_linear": True, "rl": "grpo",
                           "trl": {"use_vllm": True, "vllm_lora_sync": False, "reward_funcs": ["rewards.one"]},
                           "datasets": [{"path": "r", "type": "chat_template"}]},
    "torch_compile": {"torch_compile": True},
    "activation_offloading": {"activation_offloading": True, "fsdp": True},
    "reference_offloading": {"reference_offloading": True, "fsdp": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "fp16": {"fp16": True, "bf16": False},
    "unfrozen_parameters": {"unfrozen_parameters": ["a"], "adapter": "lora", "lora_target_linear": True},
}  # fmt: skip


def refused(tmp_path, **keys):
    with pytest.raises(UserError) as error:
        refuse_unsupported(parse_config({**BASE, **keys}, folder=tmp_path))
    return str(error.value)


@pytest.mark.parametrize("key", ASKED)
def test_a_key_without_effect_is_refused(key, tmp_path):
    assert refused(tmp_path, **ASKED[key]).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("way", "keys", "says"),
    [
        ("ipc", {}, "no CUDA device is visible; use 'folder'"),
        ("nccl", {}, "no CUDA device is visible; use 'folder'"),
        ("ipc", {"fsdp": True}, "weights that lie in shards"),
        ("ipc", {"vllm": {"host": "gpu3"}}, "name the server by 127.0.0.1"),
        ("nccl", {"bf16": True}, "nccl needs vLLM in the trainer's environment"),
    ],
)
def test_weights_are_handed_over_where_that_can_be_done(way, keys, says, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(keys))
    monkeypatch.setattr("upweight.train.refuse.find_spec", lambda _: None)
    trl = {"use_vllm": True, "vllm_weight_transfer": way, "reward_funcs": ["rewards.one"]}
    online = {"rl": "grpo", "trl": trl, "datasets": [{"path": "r", "type": "chat_template"}]}
    text = refused(tmp_path, **online, **keys)
    assert text.startswith("trl.vllm_weight_transfer: ")
    assert says in text


def test_every_refusal_is_tried_here():
    assert {key for key, *_ in UNSUPPORTED} == ASKED.keys()


def test_all_are_named_at_once(tmp_path):
    text = refused(tmp_path, **ASKED["save_only_model"], **ASKED["torch_compile"])
    assert [line.split(":")[0] for line in text.splitlines()] == ["save_only_model", "torch_compile"]


def test_a_plain_config_passes_offline_and_online(tmp_path):
    refuse_unsupported(parse_config(BASE, folder=tmp_path))
    online = {
        "rl": "grpo",
        "trl": {"reward_funcs": ["rewards.one"]},
        "datasets": [{"path": "r", "type": "chat_template"}],
    }
    refuse_unsupported(parse_config({**BASE, **online}, folder=tmp_path))


def test_quantised_weights_pass_where_they_can_be_cut_or_stay_whole(tmp_path):
    eight = {"adapter": "lora", "load_in_8bit": True, "lora_target_linear": True}
    for keys in ({"fsdp": True, **QLORA}, {"deepspeed": "zero3.json", **QLORA}, {"deepspeed": "zero2.json", **eight}):
        refuse_unsupported(parse_config({**BASE, **keys}, folder=tmp_path))
    assert refused(tmp_path, deepspeed="zero3_bf16.json", **eight).startswith("load_in_8bit: ")


def test_kto_cannot_know_its_reference_ahead(tmp_path):
    assert "apo_zero_unpaired" in refused(tmp_path, rl="kto", precompute_ref_log_probs=True)


@pytest.mark.parametrize(("folder", "says"), [("file", "is a file"), ("file/out", "is a file"), ("locked/out", "to")])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(folder, says, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "locked")  # root may write anywhere
    text = refused(tmp_path, output_dir=str(tmp_path / folder))
    assert text.startswith(f"output_dir: {tmp_path / folder.partition('/')[0]} ")
    assert text.endswith(f"{says}. Name another folder.")


@pytest.mark.parametrize(
    ("optimizer", "package"),
    [("schedule_free_adamw", "schedulefree"), ("adamw_torch_8bit", "torchao"), ("stable_adamw", "torch-optimi"),
     ("lion_8bit", "bitsandbytes")],
)  # fmt: skip
def test_an_optimizer_whose_package_is_missing_is_refused(optimizer, package, monkeypatch):
    monkeypatch.setattr("upweight.train.refuse.find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"optimizer: {optimizer} needs a package: pip install {package}"):
        require_optimizer(optimizer)
    monkeypatch.setattr("upweight.train.refuse.find_spec", lambda _: "found")
    require_optimizer(optimizer)
