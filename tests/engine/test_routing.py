"""Recorded experts: what the sampler chose is what the training forward uses, with gradients for the routers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tiny_models import drawn, gradients, relative_difference, tiny, weighted
from upweight.engine import Engine, router
from upweight.engine.activations import enable_checkpointing
from upweight.engine.packing import build_batch
from upweight.engine.routing import install_routing
from upweight.errors import UserError
from upweight.models.modules import unwrap_peft
from upweight.rollout.units import units_of_groups
from upweight.sampler.in_process import InProcess
from upweight.types import Group, Sampling

MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
PROMPTS = [drawn(1, 9).tolist(), drawn(2, 4).tolist()]


def sampled_units(model, engine, count=3):
    """Sampled completions of two prompts, with their experts, as units."""
    sampler = InProcess(model, engine=engine, end_ids=range(60, 80), records=True)
    out = sampler.generate(PROMPTS, count, Sampling(max_new_tokens=8, seed=3))
    groups = [
        Group(number, {}, prompt, completions, advantage_S=torch.linspace(-1, 1, count))
        for number, (prompt, completions) in enumerate(zip(PROMPTS, out, strict=True))
    ]
    return units_of_groups(groups, mask_truncated=False, sampler_logps=False)


def disturb(model, size=0.3):
    """Change the routers, as if other sums had been rounded otherwise, only more."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                weight.add_(size * weight.std() * torch.randn(weight.shape, generator=generator))


def chosen_experts(model, ids):
    """The experts of each token by the router modules themselves, [tokens, layers, experts]."""
    kept: list[torch.Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [module.register_forward_hook(lambda module, args, out: kept.append(out[2])) for module in routers]
    model(input_ids=torch.as_tensor(ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(kept, 1)


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_experts_of_each_fed_token_are_recorded(kind):
    model = tiny(kind)
    for unit in sampled_units(model, Engine(model)):
        (sample,) = unit.samples
        expected = chosen_experts(model, sample.ids[:-1])
        assert np.array_equal(sample.routes[:-1], expected.numpy())
        assert (sample.routes[-1] == -1).all()


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_replay_with_the_weights_that_sampled_changes_nothing(kind, layout):
    model = tiny(kind).train()
    engine = Engine(model, layout=layout)
    batch = build_batch(sampled_units(model, Engine(model)), layout)
    plain = gradients(model, weighted({"logps": engine(model, batch).logps_T}))
    out = engine(model, batch, replay=True)
    replayed = gradients(model, weighted({"logps": out.logps_T}))
    assert relative_difference(replayed, plain) < 1e-5
    assert out.router_changes_4[:2].tolist() == [0, 0]
    assert torch.allclose(out.logps_T.detach(), batch.drawn_logps_T, atol=1e-4)


@pytest.mark.parametrize("kind", MIXTURES)
def test_another_router_still_uses_the_recorded_experts(kind):
    model = tiny(kind).train()
    engine = Engine(model)
    units = sampled_units(model, engine)
    batch = build_batch(units)
    disturb(model)
    measured = engine(model, batch, replay=False)
    assert measured.router_changes_4[0] > 0
    assert measured.router_changes_4[1] > 0
    out = engine(model, batch, replay=True)
    assert out.router_changes_4[0] > 0
    assert out.router_changes_4[1] == 0
    gaps = [(one.logps_T - batch.drawn_logps_T).abs().mean().item() for one in (out, measured)]
    assert gaps[0] < gaps[1]
    found = gradients(model, weighted({"logps": out.logps_T}))
    routers = [name for name in found if name.endswith(("gate.weight", "router.weight"))]
    assert routers
    assert all(float(found[name].abs().max()) > 0 for name in routers)


def forced_by_hand(self, hidden, routes):
    """Each architecture's formula of the weights, for experts that are given."""
    kind = type(self).__name__
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = torch.nn.functional.linear(hidden, self.weight, getattr(self, "bias", None))
    if kind == "GptOssTopKRouter":
        return logits, logits.gather(-1, routes).softmax(-1), routes
    weights = logits.softmax(-1).gather(-1, routes)
    if kind == "MixtralTopKRouter" or getattr(self, "norm_topk_prob", False):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, routes


@pytest.mark.parametrize("kind", MIXTURES)
def test_forced_experts_have_the_weights_of_the_architecture(kind):
    changes = {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
    model = tiny(kind, **changes).train()
    engine = Engine(model)
    (unit,) = sampled_units(model, engine, count=1)[:1]
    disturb(model)
    batch = build_batch([unit])
    out = engine(model, batch, replay=True)
    replayed = gradients(model, weighted({"logps": out.logps_T}))
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    for layer, module in enumerate(routers):
        routes = batch.routes_NLA[:, layer].long()
        routes[-1] = torch.arange(routes.shape[1])  # of the last token nothing is scored
        module.forward = lambda hidden, module=module, routes=routes: forced_by_hand(module, hidden, routes)
    by_hand = engine(model, replace(batch, routes_NLA=None)).logps_T
    assert torch.allclose(out.logps_T, by_hand, atol=1e-5)
    assert relative_difference(replayed, gradients(model, weighted({"logps": by_hand}))) < 1e-5


def test_layers_that_are_computed_again_use_the_recorded_experts():
    model = tiny("qwen3_moe").train()
    engine = Engine(model)
    batch = build_batch(sampled_units(model, engine))
    disturb(model)
    kept = gradients(model, weighted({"logps": engine(model, batch, replay=True).logps_T}))
    enable_checkpointing(model, every_layer=True)
    out = engine(model, batch, replay=True)
    with torch.no_grad():
        engine(model, batch)  # as a reference does between a forward and its backward
        model(input_ids=batch.ids_BN[:, :3], use_cache=False)
    assert relative_difference(gradients(model, weighted({"logps": out.logps_T})), kept) < 1e-6


def test_other_forwards_choose_by_themselves_after_a_replay():
    model = tiny("qwen3_moe").train()
    engine = Engine(model)
    batch = build_batch(sampled_units(model, engine))
    plain = engine(model, batch).logps_T
    disturb(model)
    other = engine(model, batch).logps_T
    engine(model, batch, replay=True)
    assert model(input_ids=batch.ids_BN[:, :5], use_cache=False).logits.shape[:2] == (1, 5)
    assert torch.equal(engine(model, batch).logps_T, other)
    assert not torch.allclose(plain, other)


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    ],
)
def test_adapters_record_and_replay(targets):
    model = get_peft_model(tiny("qwen3_moe"), LoraConfig(r=4, **targets)).train()
    engine = Engine(model)
    units = sampled_units(model, engine)
    assert units[0].samples[0].routes.shape[1:] == (3, 2)
    batch = build_batch(units)
    before = engine(model, batch, replay=True)
    assert before.router_changes_4[:2].tolist() == [0, 0]
    disturb(unwrap_peft(model))
    out = engine(model, batch, replay=True)
    assert out.router_changes_4[1] == 0
    assert gradients(model, weighted({"logps": out.logps_T}))


def test_a_shared_token_has_one_record():
    model = tiny("qwen3_moe")
    units = sampled_units(model, Engine(model))
    batch, padded = build_batch(units), build_batch(units, "padded")
    known = [int((one.routes_NLA[:, 0, 0] >= 0).sum()) for one in (batch, padded)]
    assert known[0] < known[1] == sum(len(unit.samples[0].ids) - 1 for unit in units)
    first, second = (unit.samples[0] for unit in units[:2])
    prompt = len(PROMPTS[0])
    other = replace(second, routes=np.where(np.arange(len(second.ids))[:, None, None] < prompt, 0, second.routes))
    shared = build_batch([units[0], replace(units[1], samples=(other,))]).routes_NLA
    assert torch.equal(shared[:prompt], torch.from_numpy(first.routes[:prompt]))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("llama", "no mixture"), ("deepseek_v3", "top-k"), ("glm4_moe", "top-k"), ("llama4_text", "top-k")],
)
def test_models_whose_choices_are_not_recorded_are_refused(kind, reason):
    model = tiny(kind, **({"moe_layers": [1]} if kind == "llama4_text" else {}))
    with pytest.raises(UserError, match=rf"routing_replay: .*{reason}"):
        install_routing(model)


def test_statistics_of_routers_are_those_of_one_layer_at_a_time(monkeypatch):
    logits = [torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(layer)) for layer in range(5)]
    weight = torch.arange(14.0)
    together = router.router_statistics(logits, weight, 2)
    monkeypatch.setattr(router, "_TOGETHER", 2 * logits[0].numel())
    for name, value in router.router_statistics(logits, weight, 2).items():
        torch.testing.assert_close(value, together[name])
    probabilities = logits[3].flatten(0, 1).softmax(-1)
    torch.testing.assert_close(together["router_prob_LX"][3], weight @ probabilities)
    chosen = torch.nn.functional.one_hot(probabilities.topk(2).indices, 6).sum(1).float()
    torch.testing.assert_close(together["router_load_LX"][3], weight @ chosen)
