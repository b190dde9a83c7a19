"""Mixtures of experts on two ranks that hold shards of all experts train what one rank trains."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from made_rollouts import logged, online_trainer
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
    write_online,
)
from made_tokenizers import byte_tokenizer
from slow_cases import slow_except
from tiny_models import tiny
from upweight.config import load_config
from upweight.errors import UserError
from upweight.methods import GRPO
from upweight.models.load import disable_dropout
from upweight.models.modules import unwrap_peft
from upweight.models.shards import gathered_weights
from upweight.runs.files import EXPERT_LOAD
from upweight.train.distributed.deepspeed import require_deepspeed, zero_config
from upweight.train.distributed.ranks import join_ranks
from upweight.train.experts.blocks import refuse_units_of_experts, set_up_experts
from upweight.train.run import train

WORLD = 2
FIVE = {"num_experts": 5}  # which two ranks do not share evenly
KINDS = {"qwen3_moe": {}, "olmoe": FIVE, "mixtral": {}, "listed": FIVE}
METHODS, TRAINS = ("sft", "dpo", "grpo"), ("all", "adapter")
CASES = [f"{method} {kind} {trains}" for kind in KINDS for method in METHODS for trains in TRAINS]
HALF = "dpo qwen3_moe bf16"
FAST = ("dpo qwen3_moe all", "sft mixtral adapter", "sft listed all")
POLICY = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROUTERS = ("aux_loss", "router/entropy", "router/max_load", "router/unused_experts")


class Expert(nn.Module):
    def __init__(self, gate_up, down):
        super().__init__()
        for name, weight in (("gate_up", gate_up), ("down", down)):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.detach().clone())
            self.add_module(name, layer)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)


class ListedExperts(nn.Module):
    """Experts that are modules of their own, as in code of users; only those that tokens choose run."""

    def __init__(self, fused):
        super().__init__()
        self.experts = nn.ModuleList(map(Expert, fused.gate_up_proj, fused.down_proj))

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for number in index.unique().tolist():
            token, place = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.experts[number](hidden[token]) * weights[token, place, None])
        return out


def mixture(kind, tokenizer=None, *, adapter=False):
    """A tiny mixture with a large coefficient, perhaps under adapters of attention and experts that are not zero."""
    sizes = {"num_hidden_layers": 2, "router_aux_loss_coef": 0.3, **KINDS[kind]}
    if tokenizer is not None:
        sizes |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        sizes |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = tiny("olmoe" if kind == "listed" else kind, **sizes)
    disable_dropout(model)
    targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}
    if kind == "listed":
        targets = {"target_modules": ["q_proj", "v_proj", "gate_up", "down"]}
        for layer in model.model.layers:
            layer.mlp.experts = ListedExperts(layer.mlp.experts)
    if not adapter:
        return model
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **targets))


def trained(case, folder, ranks, **options):
    """A trainer after three steps; in the last of the offline ones a single row is left, so a rank has none."""
    name, kind, trains = case.split()
    options = {"learning_rate": 0.01, **options, **({"dtype": torch.bfloat16} if trains == "bf16" else {})}
    if name == "grpo":
        tokenizer = byte_tokenizer("chatml")
        model = mixture(kind, tokenizer, adapter=trains == "adapter")
        trainer = online_trainer(folder, method=GRPO(**POLICY), model=model, tokenizer=tokenizer, step=8 // ranks,
                                 wanted=12 // ranks, world=ranks, budget=64, **options)  # fmt: skip
    else:
        method, model = OFFLINE[name], mixture(kind, adapter=trains == "adapter")
        trainer = trainer_for(method, folder, model=model, rows=rows_for(method, 9), batch=4 // ranks, budget=64,
                              **options)  # fmt: skip
    trainer.train()
    return trainer


def result_of(trainer, weights):
    """What a run is compared by: weights, the log, and the load of each expert since the last log."""
    return weights, logged(trainer), trainer.runner.balance.take_load()


def run_fsdp(folder, cases):
    join_ranks(60)
    for case in cases:
        trainer = trained(case, folder, WORLD, fsdp=True, fsdp_config={"version": 2})
        assert isinstance(trainer.model, FSDPModule)
        experts = [weight for name, weight in trainer.model.named_parameters() if "experts" in name]
        assert experts
        assert all(isinstance(weight, DTensor) for weight in experts)
        result = result_of(trainer, {name: value.full_tensor() for name, value in weights_of(trainer).items()})
        if trainer.is_world_process_zero():
            torch.save(result, f"{folder}/{case}.pt")


def compare(found, trainer):
    """Compare a run on two ranks with that of one."""
    weights, log, load = found
    right, right_log, right_load = result_of(trainer, weights_of(trainer))
    assert weights.keys() == right.keys()
    for name, weight in right.items():
        assert float((weights[name] - weight).norm() / weight.norm()) < 1e-6, name
    assert len(log) == 3
    for line, expected in zip(log, right_log, strict=True):
        kept = {name: value for name, value in expected.items() if "second" not in name}
        assert set(ROUTERS) <= kept.keys()
        assert {name: line[name] for name in kept} == pytest.approx(kept, rel=1e-5, abs=1e-5)
    assert load == [pytest.approx(layer, abs=1e-6) for layer in right_load]


@pytest.mark.parametrize("case", slow_except(FAST, CASES))
def test_shards_of_experts_train_the_weights_of_one_rank(case, tmp_path):
    on_ranks(run_fsdp, WORLD, str(tmp_path), [case])
    compare(torch.load(tmp_path / f"{case}.pt", weights_only=False), trained(case, tmp_path, 1))


def compare_half(found, trainer):
    """In bfloat16 sums are rounded otherwise on two ranks; choices of experts are counted exactly."""
    for line, expected in zip(found[1], logged(trainer), strict=True):
        for name in ("loss", *ROUTERS):
            assert line[name] == pytest.approx(expected[name], rel=2e-2, abs=2e-2), name


def test_counts_are_not_rounded_in_half_precision(tmp_path):
    on_ranks(run_fsdp, WORLD, str(tmp_path), [HALF])
    compare_half(torch.load(tmp_path / f"{HALF}.pt", weights_only=False), trained(HALF, tmp_path, 1))


def run_zero3(folder, case):
    require_deepspeed()
    join_ranks(120)
    trainer = trained(case, folder, WORLD, deepspeed=zero_config("zero3.json", folder, torch.float32))
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    weights = gathered_weights(model, None)
    result = result_of(trainer, {name: value for name, value in weights.items() if name in trainable})
    if trainer.is_world_process_zero():
        torch.save(result, folder / "ranks.pt")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_zero3_trains_the_weights_of_one_rank(case, tmp_path):
    pytest.importorskip("deepspeed")
    on_ranks(run_zero3, WORLD, tmp_path, case)
    compare(torch.load(tmp_path / "ranks.pt", weights_only=False), trained(case, tmp_path, 1))


ADAPTER = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_target_parameters": EXPERTS,
}
RUNS = {
    "dpo all": ("qwen3_moe", write_config, {}),
    "dpo adapter": ("mixtral", write_config, {**ADAPTER, "gradient_checkpointing": True}),
    "grpo all": ("olmoe", write_online, {}),
    "grpo adapter": ("qwen3_moe", write_online, ADAPTER),
}
REPLAY = ("trl.routing_replay=true", "trl.num_iterations=2", "learning_rate=0.01")  # routers move within a rollout


def run(file, resume, *changes):
    train(load_config(file, changes), resume=resume)


def weights_in(folder):
    """The trained weights of a run folder: of the adapter, or all, as transformers loads them."""
    if (folder / "adapter_model.safetensors").exists():
        return load_file(folder / "adapter_model.safetensors")
    return {name: weight.detach() for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


def loads_of(folder):
    return [json.loads(line) for line in (folder / EXPERT_LOAD).read_text().splitlines()]


def same_metrics(log, right):
    steps = [(one, expected) for one, expected in zip(log, right, strict=True) if "loss" in expected]
    assert len(steps) == 4
    for one, expected in steps:
        for metric in ("loss", "grad_norm", *ROUTERS):
            assert one[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-5)


def whole_run(name, folder, sharding, changes=()):
    """The log of a config on two ranks, where resuming it from its middle and running it on one rank gave the same."""
    kind, write, keys = RUNS[name]
    model = write_model(folder / "model", kind, router_aux_loss_coef=0.3)
    keys = {"max_steps": 4, "save_steps": 2, "num_epochs": 9, "lr_scheduler": "constant", **keys}
    batch = 8 if write is write_online else 4
    file = write(folder, model, micro_batch_size=batch // 2, gradient_accumulation_steps=1, **keys, **sharding)
    on_ranks(run, WORLD, file, False, *changes)
    out = folder / "out"
    log, loads, weights = metrics_of(out), loads_of(out), weights_in(out)
    (out / "checkpoint-4" / "whole.json").unlink()
    on_ranks(run, WORLD, file, True, *changes)
    same_metrics(metrics_of(out), log)
    assert loads_of(out) == loads
    assert largest_difference(weights_in(out), weights) < 1e-6
    alone = [f"micro_batch_size={batch}", f"output_dir={folder / 'alone'}", *(f"{key}=null" for key in sharding)]
    train(load_config(file, [*changes, *alone]))
    same_metrics(metrics_of(folder / "alone"), log)
    assert loads_of(folder / "alone") == loads
    right = weights_in(folder / "alone")
    assert right.keys() == weights.keys()
    assert all(float((weights[key] - right[key]).norm() / right[key].norm()) < 1e-5 for key in right)
    return log


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_sharded_run_resumes_and_saves_every_expert(name, tmp_path):
    whole_run(name, tmp_path, {"fsdp": True})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo all", "grpo adapter"])
def test_the_experts_of_the_sampler_are_replayed_on_shards(name, tmp_path):
    log = [line for line in whole_run(name, tmp_path, {"fsdp": True}, REPLAY) if "loss" in line]
    assert all(line["router/rerouted_tokens"] == 0 for line in log)
    assert log[1]["router/rerouted_choices"] > 0  # the second step on a rollout


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_under_zero3_resumes_and_saves_every_expert(name, tmp_path):
    pytest.importorskip("deepspeed")
    whole_run(name, tmp_path, {"deepspeed": "zero3.json"})


@pytest.mark.parametrize(
    ("kind", "adapter", "part"), [("qwen3_moe", True, "Qwen3MoeExperts"), ("listed", False, "Expert")]
)
def test_parts_of_experts_are_no_units_of_their_own(kind, adapter, part):
    model = mixture(kind, adapter=adapter)
    with pytest.raises(UserError, match=f"transformer_layer_cls_to_wrap: '{part}' is a part of .*decoder layer"):
        refuse_units_of_experts(model, part)
    refuse_units_of_experts(model, [type(unwrap_peft(model).model.layers[0]).__name__])


def test_whole_experts_without_adapters_may_be_units():
    refuse_units_of_experts(mixture("qwen3_moe"), ["Qwen3MoeExperts"])


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    model = mixture("listed")
    set_up_experts(model, "none")
    ids = torch.tensor([[5]])
    model(input_ids=ids, labels=ids, output_router_logits=False).logits.sum().backward()
    grads = [weight.grad for name, weight in model.named_parameters() if "experts.experts" in name]
    assert all(grad is not None for grad in grads)
    assert sum(not grad.any() for grad in grads) == 2 * 3 * 2  # two layers, three of five experts, two weights each
