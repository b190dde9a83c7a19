"""The load-balancing loss of a step against transformers' own over the whole batch."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import TrainerState

from made_runs import on_ranks, rows_for
from tiny_models import drawn, gradients, relative_difference, sample, tiny
from upweight.config.sections.model import ModelSection
from upweight.config.sections.training import OptimSection
from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.methods import GRPO, KTO, ORPO, SFT
from upweight.runs.files import EXPERT_LOAD
from upweight.train.distributed.ranks import all_gather_objects, context_parallel_group, join_ranks
from upweight.train.experts.record import ExpertLoads
from upweight.train.policy import make_policy
from upweight.train.step import StepRunner
from upweight.types import Unit

MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe")
UNBALANCED = ("glm4_moe", "deepseek_v3", "llama4_text")
COEFFICIENT = 0.3


def runner_for(method, kind="qwen3_moe", *, budget=4096, coefficient=None, optim=None, context=None, **changes):
    model = tiny(kind, num_hidden_layers=2, **{"router_aux_loss_coef": COEFFICIENT, **changes}).train()
    policy = make_policy(
        model,
        method,
        torch.float32,
        torch.device("cpu"),
        longest=64,
        optim=OptimSection(token_budget=budget, router_aux_loss_coef=coefficient, **(optim or {})),
        section=ModelSection(),
        context=context,
    )
    given = {"reference": policy.reference, "router_coefficient": policy.router_coefficient}
    return StepRunner(method, policy.engine, Accelerator(cpu=True), budget, **given), policy.model


def step_gradients(runner, model, units):
    """The loss of a step, and the gradient of every weight."""
    model.zero_grad(set_to_none=True)
    loss = runner.train(model, units)
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return float(loss), found


def plain_gradients(model, units, coefficient):
    """The same of likelihood by transformers alone: one padded batch with the stock auxiliary loss."""
    samples = [one for unit in units for one in unit.samples]
    width = max(len(one.ids) for one in samples)
    ids, labels, mask = (torch.zeros(len(samples), width, dtype=torch.int64) for _ in range(3))
    labels -= 100
    for row, one in enumerate(samples):
        size = len(one.ids)
        ids[row, :size], mask[row, :size] = torch.from_numpy(one.ids), 1
        labels[row, :size] = torch.where(torch.from_numpy(one.loss_mask), ids[row, :size], -100)
    asked = {"output_router_logits": True} if coefficient else {}
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, **asked)
    loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss = loss + coefficient * out.aux_loss if coefficient else loss
    return loss.item(), gradients(model, loss)


def shared_units():
    """Texts of several lengths, four of which begin alike."""
    prompt = drawn(1, 9)
    sizes = (2, 5, 7, 3)
    shared = [Unit((sample(prompt, drawn(20 + n, size), prompt=9),)) for n, size in enumerate(sizes)]
    return shared + [Unit((sample(drawn(30 + n, 4 + 3 * n), prompt=2),)) for n in range(3)]


@pytest.mark.parametrize("budget", [4096, 20])
@pytest.mark.parametrize("kind", MIXTURES)
def test_gradients_are_those_of_the_stock_loss_over_the_whole_batch(kind, budget):
    runner, model = runner_for(SFT(), kind, budget=budget)
    assert len(runner.packer.rows(shared_units(), budget)) == (1 if budget > 100 else 4)
    loss, found = step_gradients(runner, model, shared_units())
    plain_loss, plain = plain_gradients(model, shared_units(), COEFFICIENT)
    assert loss == pytest.approx(plain_loss, abs=1e-5)
    assert relative_difference(found, plain) < 1e-5
    assert abs(loss - plain_gradients(model, shared_units(), 0.0)[0]) > 0.1


@pytest.mark.parametrize("kind", UNBALANCED)
def test_mixtures_without_the_loss_equal_a_plain_forward_and_refuse_a_coefficient(kind):
    layers = {"moe_layers": [0, 1]} if kind == "llama4_text" else {}
    runner, model = runner_for(SFT(), kind, budget=20, **layers)
    loss, found = step_gradients(runner, model, shared_units())
    plain_loss, plain = plain_gradients(model, shared_units(), 0.0)
    assert loss == pytest.approx(plain_loss, abs=1e-5)
    assert relative_difference(found, plain) < 1e-5
    with pytest.raises(UserError, match=rf"router_aux_loss_coef: {type(model).__name__} has no load-balancing loss"):
        runner_for(SFT(), kind, coefficient=0.1)
    assert runner_for(SFT(), kind, coefficient=0.0)[0].balance is None


def test_the_only_row_of_a_step_needs_no_pass_before():
    runner, model = runner_for(SFT())
    forwards = []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    runner.row_check.checked = (64, 4096)  # the first step compares forwards
    runner.train(model, shared_units())
    assert len(forwards) == 1
    runner.token_budget = 20
    runner.train(model, shared_units())
    assert len(forwards) == 1 + 2 * 4


def test_a_method_that_prepares_a_step_counts_in_that_pass_and_leaves_mismatched_completions_out():
    units = units_of(rows_for(KTO(), 6), KTO())
    assert any(one.label == -1 for unit in units for one in unit.samples)
    made = [runner_for(KTO()), runner_for(KTO(), budget=20), runner_for(KTO(), coefficient=0.0)]
    whole, cut, off = (step_gradients(runner, model, units) for runner, model in made)
    assert whole[0] == pytest.approx(cut[0], abs=1e-5)
    assert relative_difference(whole[1], cut[1]) < 1e-5
    kept = [unit for unit in units if unit.samples[0].label != -1]
    _, plain = plain_gradients(made[0][1], kept, COEFFICIENT)
    _, without = plain_gradients(made[0][1], kept, 0.0)
    ours = {name: whole[1][name] - off[1][name] for name in plain}
    assert relative_difference(ours, {name: plain[name] - without[name] for name in plain}) < 1e-4


def test_what_methods_and_keys_say_about_the_loss():
    assert runner_for(SFT())[0].router_coefficient == COEFFICIENT
    assert runner_for(SFT(), coefficient=0.5)[0].router_coefficient == 0.5
    assert runner_for(SFT(), coefficient=0.0)[0].balance is None
    assert runner_for(ORPO())[0].balance is None
    assert runner_for(ORPO(), output_router_logits=True)[0].router_coefficient == COEFFICIENT
    assert runner_for(SFT(), "llama")[0].balance is None
    with pytest.raises(UserError, match="LlamaForCausalLM has no load-balancing loss"):
        runner_for(SFT(), "llama", coefficient=0.1)


def test_completions_without_an_advantage_count_too():
    def unit(ids, advantage):
        return Unit((replace(sample(ids, prompt=3), advantage=advantage),))

    units = [unit(drawn(40, 8), 0.5), unit(drawn(41, 9), 0.0)]
    runner, model = runner_for(GRPO())
    runner.skip_zero_advantage = True
    runner.train(model, units)
    metrics = runner.meters.drain(runner.accelerator)
    assert metrics["forwarded_share"] == 1.0
    assert runner.balance.step_tokens == 17


def test_metrics_show_how_even_the_loads_are():
    runner, model = runner_for(SFT(), budget=20)
    runner.train(model, shared_units())
    metrics = runner.meters.drain(runner.accelerator)
    with_loss, without = (plain_gradients(model, shared_units(), value)[0] for value in (1.0, 0.0))
    assert metrics["aux_loss"] == pytest.approx(with_loss - without, abs=1e-5)
    assert 0 < metrics["router/entropy"] < 1
    assert 1 <= metrics["router/max_load"] <= 4
    assert 0 <= metrics["router/unused_experts"] < 1
    load = runner.balance.take_load()
    assert [sum(layer) for layer in load] == pytest.approx([1, 1])
    assert max(load[0]) * 4 > 1
    assert runner.balance.take_load() is None


def test_an_expert_that_is_never_chosen_is_counted():
    runner, model = runner_for(SFT())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()  # equal probabilities: the first two of four experts
    runner.train(model, shared_units())
    metrics = runner.meters.drain(runner.accelerator)
    assert metrics["router/unused_experts"] == 0.5
    assert metrics["router/entropy"] == pytest.approx(1)
    assert metrics["router/max_load"] == pytest.approx(2)


def test_recomputing_activations_changes_nothing():
    runner, model = runner_for(SFT(), budget=20)
    whole = step_gradients(runner, model, shared_units())
    again = {"gradient_checkpointing": True, "checkpointing_args": {"every_layer": True}}
    runner, model = runner_for(SFT(), budget=20, optim=again)
    saved = step_gradients(runner, model, shared_units())
    assert saved[0] == pytest.approx(whole[0], abs=1e-5)
    assert relative_difference(saved[1], whole[1]) < 1e-5


def test_recomputing_that_loses_the_gradient_is_refused():
    again = {"gradient_checkpointing": True, "checkpointing_args": {"use_reentrant": True}}
    with pytest.raises(UserError, match="loses the gradient of the routers' load-balancing loss"):
        runner_for(SFT(), optim=again)
    runner_for(SFT(), optim=again, coefficient=0.0)


def gradients_on_ranks(folder, context_size):
    """Save the step's loss and gradients, averaged over ranks as DDP does."""
    state, _ = join_ranks(60)
    runner, model = runner_for(SFT(), budget=20, context=context_parallel_group(context_size))
    loss, found = step_gradients(runner, model, shared_units())
    losses = all_gather_objects(loss)
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient.div_(state.num_processes)
    metrics = runner.meters.drain(runner.accelerator)
    if state.is_main_process:
        torch.save({"loss": sum(losses) / len(losses), "gradients": found, "metrics": metrics}, f"{folder}/ranks.pt")


@pytest.mark.parametrize("context_size", [1, 2])
def test_ranks_share_the_loss_of_the_step(context_size, tmp_path):
    on_ranks(gradients_on_ranks, 2, str(tmp_path), context_size)
    shared = torch.load(tmp_path / "ranks.pt")
    runner, model = runner_for(SFT(), budget=20)
    loss, alone = step_gradients(runner, model, shared_units())
    metrics = runner.meters.drain(runner.accelerator)
    assert shared["loss"] == pytest.approx(loss, abs=1e-5)
    assert relative_difference(shared["gradients"], alone) < 1e-5
    for name in ("aux_loss", "router/entropy", "router/max_load", "router/unused_experts"):
        assert shared["metrics"][name] == pytest.approx(metrics[name], abs=1e-5)


def test_loads_are_written_for_each_log_and_cut_for_a_resumed_run(tmp_path):
    runner, model = runner_for(SFT())
    written = ExpertLoads(tmp_path, runner.balance)
    for step in (1, 2, 3):
        runner.train(model, shared_units())
        written.on_log(None, TrainerState(global_step=step), None, logs={"loss": 1.0})
    written.on_train_begin(None, TrainerState(global_step=2), None)
    rows = [json.loads(line) for line in (tmp_path / EXPERT_LOAD).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [len(layer) for layer in rows[0]["load"]] == [4, 4]
    assert [sum(layer) for layer in rows[0]["load"]] == pytest.approx([1, 1], abs=1e-5)
