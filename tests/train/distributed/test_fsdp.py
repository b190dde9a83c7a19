"""Sharded weights on two ranks train what one rank trains; checkpoints go on exactly; the result is whole."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from made_rollouts import online_trainer
from made_runs import (
    OFFLINE,
    largest_difference,
    metrics_of,
    on_ranks,
    rows_for,
    started,
    timeless,
    trainer_for,
    weights_of,
    write_config,
    write_model,
)
from upweight.config import load_config, parse_config
from upweight.errors import UserError
from upweight.methods import GDPO, GRPO
from upweight.models.patches import shard_on_cpu
from upweight.train.distributed.fsdp import build_sharding, fsdp_arguments
from upweight.train.distributed.ranks import join_ranks
from upweight.train.run import build, evaluate, train

WORLD = 2
ROWS = [{"path": "rows.jsonl", "type": "chatml.intel"}]
CASES = {
    "sft adapter": {"adapter": True},
    "dpo": {"max_grad_norm": 0.05},
    "dpo adapter": {"adapter": True},
    "kto": {},
    "kto bf16": {"dtype": torch.bfloat16},
    "orpo": {},
    "orm": {},
    "grpo": {},
    "grpo adapter": {"adapter": True},
    "gdpo": {},
    "gdpo gathered": {"fsdp_config": {"reshard_after_forward": False}},
}
WRITES = {"num_generations": 4, "max_completion_length": 6}
ONLINE = {"grpo": GRPO(**{**WRITES, "beta": 0.1}), "gdpo": GDPO(**WRITES)}
LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4}


def trained(case, folder, ranks, **options):
    name, given = case.split()[0], {**CASES[case]}
    sharded = options and {**options, "fsdp_config": {"version": 2, **given.pop("fsdp_config", {})}}
    given.pop("fsdp_config", None)
    if name in ONLINE:
        trainer = online_trainer(folder, method=ONLINE[name], step=8 // ranks, wanted=12 // ranks, world=ranks,
                                 evaluation=3, **given, **sharded)  # fmt: skip
    else:
        method = OFFLINE[name]
        rows = rows_for(method, 9)
        trainer = trainer_for(method, folder, rows=rows, batch=4 // ranks, budget=64, **given, **sharded)
    trainer.train()
    if name in ONLINE:
        trainer.evaluate()
    return trainer


class Operations(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.names.append(operation.name())
        return operation(*arguments, **(options or {}))


def gathers_of_a_rollout(trainer):
    """Collectives by which weights are gathered while completions of several tokens are written."""
    with Operations() as seen:
        trainer.evaluate()
    return seen.names.count("c10d::_allgather_base_")


def run_rank(folder):
    join_ranks(60)
    for case in CASES:
        trainer = trained(case, folder, WORLD, fsdp=True)
        assert isinstance(trainer.model, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
        if case.split()[0] in ONLINE:
            units = sum(isinstance(module, FSDPModule) for module in trainer.model.modules())
            assert 0 < gathers_of_a_rollout(trainer) <= units
        weights = {name: value.full_tensor() for name, value in weights_of(trainer).items()}
        if trainer.is_world_process_zero():
            torch.save([weights, trainer.state.log_history], f"{folder}/{case}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(run_rank, WORLD, str(folder))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_shards_on_two_ranks_train_the_weights_of_one(on_two_ranks, case, tmp_path):
    """The last of the three steps has one row, so that one rank has nothing to do."""
    trainer = trained(case, tmp_path, 1)
    found, log = torch.load(on_two_ranks / f"{case}.pt", weights_only=False)
    # In bf16 the summed log-probs of a row lie 0.05 to 0.1 from float32's on either side, and beta is 0.1.
    half = "bf16" in case
    near = partial(pytest.approx, rel=2e-2, abs=2e-2) if half else partial(pytest.approx, rel=1e-5, abs=1e-5)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert largest_difference(found, weights_of(trainer)) < (
        1e-3 if half else 1e-5 if case.split()[0] in ONLINE else 1e-6
    )
    for line, right in zip(log[:3], trainer.state.log_history[:3], strict=True):
        kept = {name: value for name, value in timeless(right).items() if "second" not in name}
        assert {name: line[name] for name in kept} == near(kept)


KINDS = {
    "full": {"val_set_size": 4, "eval_steps": 2, "load_best_model_at_end": True, "sync_ref_model": True,
             "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3, "fsdp": True},
    "adapter": {**LORA, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True}},
    "ternary": {"use_onebitllms": True, "fsdp": True},
}  # fmt: skip


def run(file, resume=False):
    torch.compiler.set_stance("force_eager")  # transformers compiles the rounding of ternary weights, for a minute
    train(load_config(file), resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "adapter", "ternary"])
def test_a_sharded_run_resumes_exactly_and_leaves_a_whole_model(kind, model_folder, tmp_path):
    if kind == "full":
        model_folder = write_model(tmp_path / "tied", tie_word_embeddings=True)
    file = write_config(tmp_path, model_folder, micro_batch_size=1, max_steps=4, save_steps=2, **KINDS[kind])
    out = tmp_path / "out"
    on_ranks(run, WORLD, file)
    right, name = metrics_of(out), "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    result = load_file(out / name)
    assert any((out / "checkpoint-2").glob("pytorch_model_fsdp*"))
    (out / "checkpoint-4" / "whole.json").unlink()
    (out / name).unlink()
    on_ranks(run, WORLD, file, True)
    assert metrics_of(out) == right
    assert largest_difference(load_file(out / name), result) == 0
    with pytest.raises(UserError, match="are sharded by FSDP; to go on from there, set 'fsdp: true'"):
        train(load_config(file, ["fsdp=false"]), resume=True)
    if kind == "full":
        assert "lm_head.weight" not in result
        model = AutoModelForCausalLM.from_pretrained(out)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert torch.equal(model.lm_head.weight, result["model.embed_tokens.weight"])
    elif kind == "ternary":
        model = AutoModelForCausalLM.from_pretrained(out)
        assert type(model.model.layers[0].mlp.up_proj).__name__ == "AutoBitLinear"
    else:
        assert any(bool(value.any()) for key, value in result.items() if "lora_B" in key)
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), out)
    on_fewer_ranks(file, out, right, name)


def run_alone(file):
    torch.compiler.set_stance("force_eager")
    train(load_config(file, ["micro_batch_size=2"]), resume=True)


def on_fewer_ranks(file, out, right, name):
    """One process, which no launcher starts, goes on from the shards of two."""
    result = load_file(out / name)
    (out / "checkpoint-4" / "whole.json").unlink()
    alone = started(run_alone, file)
    alone.join(120)
    assert alone.exitcode == 0
    for line, expected in zip(metrics_of(out), right, strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert largest_difference(load_file(out / name), result) < 1e-5


def measure(file, result):
    metrics = evaluate(load_config(file))
    with open(result, "a") as lines:
        lines.write(json.dumps(metrics) + "\n")


def test_sharded_weights_are_evaluated_too(model_folder, tmp_path):
    keys = {"val_set_size": 6, "rl": "orpo"}
    on_ranks(measure, WORLD, write_config(tmp_path, model_folder, fsdp=True, **keys), str(tmp_path / "sharded"))
    found = [timeless(json.loads(line)) for line in (tmp_path / "sharded").read_text().splitlines()]
    alone = timeless(evaluate(load_config(write_config(tmp_path, model_folder, **keys))))
    assert found == [pytest.approx(alone, rel=1e-5)] * 2


QLORA = {**LORA, "adapter": "qlora", "load_in_4bit": True}


def run_quantised(file, result):
    trainer = build(load_config(file))
    trainer.train()
    packed = [module.weight for module in trainer.model.modules() if getattr(module, "quant_state", None) is not None]
    assert packed
    assert all(isinstance(weight, DTensor) and weight.dtype == torch.float32 for weight in packed)
    if trainer.is_world_process_zero():
        torch.save(trainer.state.log_history, result)


def test_quantised_weights_are_sharded_too(model_folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    file = write_config(tmp_path, model_folder, max_steps=3, fsdp=True, micro_batch_size=1, **QLORA)
    on_ranks(run_quantised, WORLD, file, tmp_path / "log.pt")
    alone = build(load_config(file, ["fsdp=false", "micro_batch_size=2"]))
    alone.train()
    for line, right in zip(torch.load(tmp_path / "log.pt")[:3], alone.state.log_history[:3], strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(right[name], rel=1e-5, abs=1e-5)


def accelerate_alone():
    """What accelerate makes of a plugin on CPU ranks; when this fails, `shard_on_cpu` can go."""
    join_ranks(60)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    shard_on_cpu(accelerator.state, plugin)
    assert accelerator.is_fsdp2
    accelerator.wait_for_everyone()  # rank 0 holds the store by which the others find each other


def test_accelerate_still_drops_fsdp_on_cpu_ranks():
    on_ranks(accelerate_alone, WORLD)


@pytest.mark.parametrize(
    ("keys", "on", "reshard", "offload"),
    [
        ({}, False, True, False),
        ({"fsdp": False, "fsdp_config": {"version": 2}}, False, True, False),
        ({"fsdp_version": 2}, True, True, False),
        ({"fsdp": ["shard_grad_op", "auto_wrap", "offload"]}, True, False, True),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}}, True, False, True),
    ],
)
def test_both_versions_keys_are_read(keys, on, reshard, offload):
    section = parse_config({"base_model": "tiny", "rl": "dpo", "datasets": ROWS, **keys}, folder=Path()).sharding
    assert (bool(section.fsdp), section.reshard, section.offload) == (on, reshard, offload)
    assert build_sharding(section, ranks=1) == "none"
    assert build_sharding(section, ranks=2) == ("fsdp" if on else "none")
    assert fsdp_arguments(section)["fsdp_config"]["reshard_after_forward"] == reshard


def test_an_adapter_made_from_the_weights_needs_them_on_every_rank():
    def once(**keys):
        content = {"base_model": "tiny", "rl": "dpo", "datasets": ROWS, "fsdp": True, **keys}
        return parse_config(content, folder=Path()).sharding.low_memory_loading

    assert once()
    assert once(**LORA)
    assert not once(**LORA, peft_init_lora_weights="pissa")
    assert not once(**LORA, lora_modules_to_save=["lm_head"])
    assert not once(**QLORA)
    assert not once(fsdp_config={"cpu_ram_efficient_loading": False})
