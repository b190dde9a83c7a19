"""DeepSpeed's configs as this loop needs them, and ZeRO on two ranks against one where DeepSpeed is installed."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from made_rollouts import online_trainer
from made_runs import (
    OFFLINE,
    largest_difference,
    metrics_of,
    on_ranks,
    rows_for,
    trainer_for,
    weights_of,
    write_config,
    write_model,
)
from upweight.config import load_config
from upweight.config.zero import ready_configs
from upweight.errors import UserError
from upweight.methods import GRPO
from upweight.models.shards import any_sharded, gathered_weights, is_sharded
from upweight.train.distributed.deepspeed import fit_to_ranks, require_deepspeed, zero_config
from upweight.train.distributed.ranks import join_ranks
from upweight.train.run import build, train

WORLD = 2
CASES = ("dpo", "dpo adapter", "grpo", "grpo adapter")
LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4}
POLICY = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}


def test_the_missions_file_is_found_by_its_name(tmp_path):
    found = zero_config("deepspeed_configs/zero3_bf16.json", tmp_path, torch.bfloat16)
    assert found["zero_optimization"]["stage"] == 3
    assert found["bf16"] == {"enabled": True}
    assert zero_config("zero3_bf16.json", tmp_path, torch.bfloat16) == found
    with pytest.raises(UserError, match=r"there is no file other/zero3\.json. Ready ones are zero1\.json"):
        zero_config("other/zero3.json", tmp_path, torch.bfloat16)


def test_a_file_beside_the_config_wins(tmp_path):
    (tmp_path / "deepspeed_configs").mkdir()
    own = {"zero_optimization": {"stage": 1}}
    (tmp_path / "deepspeed_configs" / "zero3_bf16.json").write_text(json.dumps(own))
    assert zero_config("deepspeed_configs/zero3_bf16.json", tmp_path, torch.float32)["zero_optimization"] == {
        "stage": 1
    }


def test_what_this_loop_decides_is_left_to_it(tmp_path):
    given = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 7,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True, "immediate_grad_update": True},
    }
    found = zero_config(given, tmp_path, torch.float32)
    assert found["train_micro_batch_size_per_gpu"] == found["gradient_accumulation_steps"] == "auto"
    assert found["gradient_clipping"] == "auto"
    assert found["bf16"] == {"enabled": False, "immediate_grad_update": True}
    assert found["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    assert given["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}, "'optimizer' is not taken"),
        ({"bf16": {"enabled": True}}, "'zero_optimization.stage' has to be 1, 2 or 3"),
    ],
)
def test_what_has_no_effect_is_refused(given, text, tmp_path):
    with pytest.raises(UserError, match=text):
        zero_config(given, tmp_path, torch.float32)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_it_is_said_when_deepspeed_is_missing():
    with pytest.raises(UserError, match="pip install deepspeed"):
        require_deepspeed()


@pytest.mark.parametrize("name", ready_configs())
def test_ready_configs_fit_deepspeeds_own_schema(name, tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    options = zero_config(name, tmp_path, torch.bfloat16)["zero_optimization"]
    fixed = {key: value for key, value in options.items() if value != "auto"}
    assert DeepSpeedZeroConfig(**fixed).stage == int(name[4])


def trained(case, folder, ranks, **options):
    name, adapter = case.split()[0], "adapter" in case
    if name == "grpo":
        trainer = online_trainer(folder, method=GRPO(**POLICY), step=8 // ranks, wanted=12 // ranks, world=ranks,
                                 adapter=adapter, learning_rate=0.1, **options)  # fmt: skip
    else:
        method = OFFLINE[name]
        trainer = trainer_for(method, folder, rows=rows_for(method, 9), batch=4 // ranks, budget=64, adapter=adapter,
                              **options)  # fmt: skip
    trainer.train()
    return trainer


def run_rank(folder, case, stage):
    require_deepspeed()
    join_ranks(120)
    trainer = trained(case, folder, WORLD, deepspeed=zero_config(f"zero{stage}.json", folder, torch.float32))
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert any_sharded(model) == (stage == 3)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    weights = gathered_weights(model, None) if stage == 3 else weights_of(trainer)
    if trainer.is_world_process_zero():
        weights = {name: value for name, value in weights.items() if name in trainable}
        torch.save([weights, trainer.state.log_history], folder / "ranks.pt")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_zero_on_two_ranks_trains_the_weights_of_one(case, stage, tmp_path):
    """The last of the three steps of DPO has one row, so that one rank has nothing to do."""
    pytest.importorskip("deepspeed")
    on_ranks(run_rank, WORLD, tmp_path, case, stage)
    found, log = torch.load(tmp_path / "ranks.pt", weights_only=False)
    trainer = trained(case, tmp_path, 1)
    assert largest_difference(found, weights_of(trainer)) < 1e-5
    for line, right in zip(log[:3], trainer.state.log_history[:3], strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(right[name], rel=1e-5, abs=1e-5)


def run(file, resume, *changes):
    train(load_config(file, changes), resume=resume)


def run_loaded_in_pieces(file, log, quantised):
    trainer = build(load_config(file), trains=True)
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = [weight for name, weight in model.named_parameters() if "lora" not in name]
    assert all(is_sharded(weight) and not weight.numel() for weight in base) != quantised  # before DeepSpeed has it
    trainer.train()
    assert all(map(is_sharded, base))
    if trainer.is_world_process_zero():
        torch.save(trainer.state.log_history, log)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "adapter", "orm", "qlora"])
def test_ranks_that_never_hold_all_weights_train_as_one_does(kind, tmp_path):
    """ZeRO-3 cuts weights as they are read; those that are quantised while they are read, afterwards."""
    pytest.importorskip("deepspeed")
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    model = write_model(tmp_path / "model", tie_word_embeddings=kind == "full")
    keys = {"full": {}, "adapter": LORA, "orm": {"rl": None, "reward_model": True},
            "qlora": {**LORA, "adapter": "qlora", "load_in_4bit": True}}[kind]  # fmt: skip
    given = {"val_set_size": 4, "eval_steps": 3, "max_steps": 3, **keys}
    file = write_config(tmp_path, model, micro_batch_size=1, deepspeed="zero3.json", **given)
    on_ranks(run_loaded_in_pieces, WORLD, file, tmp_path / "log.pt", kind == "qlora")
    alone = build(load_config(write_config(tmp_path, model, micro_batch_size=2, **given)))
    alone.train()
    for line, right in zip(torch.load(tmp_path / "log.pt")[:4], alone.state.log_history[:4], strict=True):
        for name in right.keys() & {"loss", "grad_norm", "eval_loss"}:
            assert line[name] == pytest.approx(right[name], rel=1e-5, abs=1e-5)


KINDS = {"full": {"tie_word_embeddings": True}, "adapter": {}}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "kind"), [(1, "adapter"), (2, "full"), (3, "full"), (3, "adapter")])
def test_a_run_goes_on_with_fewer_ranks_and_with_more(stage, kind, tmp_path):
    """Weight decay differs between weights, which ZeRO-3 by itself would forget."""
    pytest.importorskip("deepspeed")
    model = write_model(tmp_path / "model", **KINDS[kind])
    keys = {"deepspeed": f"zero{stage}.json", "weight_decay": 0.3, **(LORA if kind == "adapter" else {})}
    file = write_config(tmp_path, model, micro_batch_size=1, max_steps=6, save_steps=2, num_epochs=9, **keys)
    on_ranks(run, 2, file, False)
    out, name = tmp_path / "out", "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    right, result = metrics_of(out), load_file(out / name)
    for ranks, lost in ((1, (4, 6)), (2, (6,))):
        for step in lost:
            (out / f"checkpoint-{step}" / "whole.json").unlink()
        on_ranks(run, ranks, file, True, f"micro_batch_size={2 // ranks}")
        for line, expected in zip(metrics_of(out), right, strict=True):
            assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert largest_difference(load_file(out / name), result) < 1e-5


def test_a_checkpoint_that_cannot_be_converted_names_the_ranks_it_needs(tmp_path):
    folder = tmp_path / "checkpoint-2" / "global_step2"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("global_step2")
    for rank in range(2):
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    trainer = trainer_for(OFFLINE["orpo"], tmp_path)
    with pytest.raises(UserError, match=r"2 ranks wrote .* failed to convert it; go on with .*--num-processes 2"):
        fit_to_ranks(folder.parent, trainer)
    trainer.args.load_best_model_at_end = True
    with pytest.raises(UserError, match=r"these are 1; 'load_best_model_at_end' .* or go on with .*--num-processes 2"):
        fit_to_ranks(folder.parent, trainer)
