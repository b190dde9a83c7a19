"""What a config needs of the machine is looked for before anything is loaded, all of it at once."""

import pytest

from upweight.config import parse_config
from upweight.config.rules import NOT_VALIDATED
from upweight.errors import UserError
from upweight.train.machine_checks import check_machine, mps_problems, require_machine

BASE = {"base_model": "tiny", "rl": "dpo", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}
WHOLE_WEIGHTS = {"optim_target_modules": "all-linear"}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True}


def online(**trl):
    trl = {"reward_funcs": ["rewards.one"], **trl}
    return {"rl": "grpo", "trl": trl, "datasets": [{"path": "r", "type": "chat_template"}]}


def refused(tmp_path, **keys):
    with pytest.raises(UserError) as error:
        require_machine(parse_config({**BASE, **keys}, folder=tmp_path), trains=True)
    return str(error.value)


@pytest.fixture
def bare(monkeypatch):
    """A machine without GPUs, on which nothing is installed."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("upweight.train.machine_checks._installed", lambda _: False)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"fp16": True, "bf16": False}, "fp16: float16 with loss scaling needs a CUDA device"),
        ({"wandb_project": "x"}, "wandb_project: the tracker is not installed: pip install wandb, or drop the key"),
        ({"use_tensorboard": True}, "use_tensorboard: the tracker is not installed: pip install tensorboard"),
        (QLORA, "load_in_4bit, load_in_8bit: quantised weights need bitsandbytes"),
        ({"deepspeed": "zero2.json"}, "deepspeed: is not installed"),
        ({"optimizer": "schedule_free_adamw"}, "needs a package: pip install schedulefree"),
        ({"optimizer": "adamw_torch_8bit"}, "needs a package: pip install torchao"),
        ({"optimizer": "stable_adamw"}, "needs a package: pip install torch-optimi"),
        ({**WHOLE_WEIGHTS, "optimizer": "galore_adamw"}, "needs a package: pip install galore-torch"),
        ({**WHOLE_WEIGHTS, "optimizer": "galore_adamw_8bit"}, "needs a CUDA device, and none is visible; use 'galore"),
        ({**WHOLE_WEIGHTS, "optimizer": "apollo_adamw"}, "needs a package: pip install apollo-torch"),
        ({"optimizer": "lion_8bit"}, "needs a package: pip install bitsandbytes"),
        (online(use_vllm=True, vllm_mode="colocate"), "trl.vllm_mode: colocate needs vLLM in this Python environment"),
        (online(use_vllm=True, vllm_weight_transfer="ipc"), "no CUDA device is visible; use 'folder'"),
        (online(use_vllm=True, vllm_weight_transfer="nccl"), "nccl needs vLLM in the trainer's environment"),
    ],
)
def test_what_is_missing_is_named(keys, says, tmp_path):
    assert says in refused(tmp_path, **keys)


@pytest.mark.parametrize(("optimizer", "package"), [("galore_adamw", "galore_torch"), ("apollo_adamw", "apollo_torch")])
def test_projected_optimizers_import_bitsandbytes(optimizer, package, tmp_path, bare, monkeypatch):
    monkeypatch.setattr("upweight.train.machine_checks._installed", lambda name: name == package)
    text = refused(tmp_path, **WHOLE_WEIGHTS, optimizer=optimizer)
    assert text.endswith("is installed, and imports one that is not: pip install bitsandbytes.")


@pytest.mark.parametrize(("number", "fits"), [("0.7.20", True), ("0.10.3", False)])
def test_a_swanlab_that_transformers_cannot_call_is_named(number, fits, tmp_path, monkeypatch):
    monkeypatch.setattr("upweight.train.machine_checks._installed", lambda _: True)
    monkeypatch.setattr("upweight.train.machine_checks.version", lambda _: number)
    problems = check_machine(parse_config({**BASE, "use_swanlab": True}, folder=tmp_path))
    reason = f"transformers calls what swanlab {number} no longer has"
    named = [f'use_swanlab: {reason}: pip install "swanlab<0.8", or drop the key.']
    assert problems == ([] if fits else named)


def test_nothing_is_wanted_that_is_not_used(tmp_path, bare):
    assert check_machine(parse_config(BASE, folder=tmp_path)) == []
    assert check_machine(parse_config({**BASE, **online()}, folder=tmp_path)) == []


def test_who_does_not_train_needs_no_optimizer(tmp_path, bare):
    config = parse_config({**BASE, "optimizer": "lion_8bit"}, folder=tmp_path)
    require_machine(config, trains=False)
    assert len(check_machine(config)) == 1


def test_a_gpu_without_tf32_is_told_of_only_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("upweight.train.machine_checks.is_torch_tf32_available", lambda: False)
    assert refused(tmp_path, tf32=True).startswith("tf32: ")
    assert check_machine(parse_config(BASE, folder=tmp_path)) == []


def test_all_are_named_at_once(tmp_path, bare):
    text = refused(tmp_path, wandb_project="x", deepspeed="nowhere/zero9.json", resume_from_checkpoint="nowhere")
    places = ["wandb_project", "deepspeed", "resume_from_checkpoint", "deepspeed"]
    assert [line.split(":")[0] for line in text.splitlines()] == places


def test_validate_names_what_it_leaves_to_the_machine():
    assert NOT_VALIDATED == ("GPUs", "installed packages", "folders", "servers")


@pytest.mark.parametrize(("folder", "says"), [("file", "is a file"), ("file/out", "is a file"), ("locked/out", "to")])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(folder, says, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "locked")  # root may write anywhere
    text = refused(tmp_path, output_dir=str(tmp_path / folder))
    assert text.startswith(f"output_dir: {tmp_path / folder.partition('/')[0]} ")
    assert text.endswith(f"{says}. Name another folder.")


def test_what_needs_float64_is_refused_on_apples_gpu(tmp_path):
    whole = lambda keys: parse_config({**BASE, **keys}, folder=tmp_path)  # noqa: E731
    assert not list(mps_problems(whole({})))
    (sampled,) = mps_problems(whole(online()))
    assert sampled.startswith("rl: grpo")
    texts = {"rl": None, "datasets": [{"path": "rows.jsonl", "type": "completion"}]}
    (noisy,) = mps_problems(whole({**texts, "neftune_noise_alpha": 5}))
    assert noisy.startswith("neftune_noise_alpha")
    assert any("CUDA" in problem for problem in mps_problems(whole(QLORA)))
