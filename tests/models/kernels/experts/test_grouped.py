"""Experts as grouped products against the forward of transformers."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny_models import drawn, gradients, relative_difference, sample, tiny
from upweight.engine import Engine
from upweight.engine.packing import build_batch
from upweight.models.kernels.experts import grouped
from upweight.models.kernels.experts.grouped import group_experts
from upweight.types import Unit

KINDS = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe", "deepseek_v3"]


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def outputs(model, rows=2, length=9):
    ids = torch.randint(3, 80, (rows, length), generator=torch.Generator().manual_seed(2))
    logits = model(input_ids=ids).logits
    return logits.detach(), gradients(model, logits.log_softmax(-1)[..., 5].sum())


def experts_of(model):
    return [module for module in model.modules() if grouped.is_groupable(module)]


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers(kind, length):
    model = tiny(kind, num_hidden_layers=2)
    plain, plain_gradients = outputs(model, length=length)
    group_experts(model)
    assert all("_stock_forward" in vars(module) for module in experts_of(model))
    assert experts_of(model)
    ours, our_gradients = outputs(model, length=length)
    torch.testing.assert_close(ours, plain, atol=2e-4, rtol=1e-4)
    assert relative_difference(our_gradients, plain_gradients) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(outputs_without_gradients(model, length), ours, atol=2e-4, rtol=1e-4)


def outputs_without_gradients(model, length):
    ids = torch.randint(3, 80, (2, length), generator=torch.Generator().manual_seed(2))
    return model(input_ids=ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", ["one", "two", "all"])
def test_experts_without_tokens(chosen, dtype):
    module = experts_of(tiny("qwen3_moe", num_hidden_layers=1))[0].to(dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 32, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(7, 2, generator=generator).to(dtype).requires_grad_()
    index = {"one": [3, 3], "two": [2, 0]}.get(chosen)
    index = torch.tensor([index] * 7) if index else torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    inputs = [hidden, weights, *module.parameters()]

    def run():
        out = module(hidden, index, weights)
        return [out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)]

    stock = run()
    group_experts(module)
    for ours, theirs in zip(run(), stock, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * theirs.norm()


def test_no_gradient_is_added_up_pair_by_pair():
    model = tiny("qwen3_moe", num_hidden_layers=2)
    counts = []
    for setup in (lambda _: None, group_experts):
        setup(model)
        with Operators() as seen:
            outputs(model)
        counts.append([name for name in seen.names if name in ("index_put", "index_put_", "_index_put_impl_")])
    assert len(counts[1]) < len(counts[0]) - 4


def logps_one_by_one(model, units):
    parts = []
    for unit in units:
        ids = torch.from_numpy(unit.samples[0].ids)
        scored = torch.from_numpy(unit.samples[0].loss_mask)[1:]
        parts.append(model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[scored, 0])
    return torch.cat(parts)


def gaps_to_float32(kind, seed, length):
    """Mean distances of log-probs in bfloat16 from those in float32: transformers' forward, the engine's."""
    model = tiny(kind)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.24, generator=generator)
    model.bfloat16()
    prompt = drawn(seed, 9)
    units = [Unit((sample(prompt, drawn(100 * seed + n, length), prompt=9),)) for n in range(6)]
    with torch.no_grad():
        right = logps_one_by_one(copy.deepcopy(model).float(), units)
        stock = logps_one_by_one(model, units)
        engine = Engine(model)
        ours = engine(model, build_batch(units, engine.layout)).logps_T
    assert ours is not None
    assert any("_stock_forward" in vars(module) for module in experts_of(model))
    return [float((found - right).abs().mean()) for found in (stock, ours)]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(kind):
    # In one batch either is up to three times nearer: a router whose scores nearly tie sends a token elsewhere.
    stock, ours = torch.tensor([gaps_to_float32(kind, seed, length=20) for seed in range(8)]).mean(0).tolist()
    assert ours < 1.3 * stock
    assert stock < 0.1


def experts_run(experts, half, given, index, to_sum):
    """The output of experts for tokens and router weights in half precision or wide, and all gradients."""
    tokens, weights = (x.to(x.dtype if half else torch.float32, copy=True).requires_grad_() for x in given)
    out = experts(tokens, index, weights)
    return [out.detach(), *torch.autograd.grad((out.float() * to_sum).sum(), [tokens, weights, *experts.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32 weights", "bfloat16 weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(kind, dtype):
    module = experts_of(tiny(kind, num_hidden_layers=2))[0]
    gaps = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        hidden, to_sum = torch.randn(2, 64, 32, generator=generator)
        given = hidden.bfloat16(), torch.rand(64, 2, generator=generator).to(dtype)
        index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(64)])
        stock = copy.deepcopy(module)
        for weight in stock.parameters():
            weight.data.normal_(0, 0.24, generator=generator)
        stock.bfloat16()
        right, ours = copy.deepcopy(stock).float(), copy.deepcopy(stock)
        group_experts(ours)
        known = experts_run(right, False, given, index, to_sum)
        found = [experts_run(one, True, given, index, to_sum) for one in (stock, ours)]
        gaps.append([[float((a - b).abs().mean()) for a, b in zip(one, known, strict=True)] for one in found])
    of_stock, of_ours = torch.tensor(gaps).mean(0)
    assert (of_ours < 1.1 * of_stock).all()  # of the output, and of the gradients of tokens and of all weights


def test_other_implementations_run_as_they_are():
    model = tiny("qwen3_moe", num_hidden_layers=1)
    model.set_experts_implementation("eager")
    plain = outputs(model)[0]
    group_experts(model)
    assert torch.equal(outputs(model)[0], plain)


def test_rows_that_grouped_products_do_not_take_run_one_expert_after_the_other(caplog):
    model = tiny("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=18)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        outputs(model)
    group_experts(model)
    ours, our_gradients = outputs(model)
    assert "no multiple of 16 bytes" in caplog.text
    plain = tiny("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=18)
    plain.set_experts_implementation("eager")
    logits, plain_gradients = outputs(plain)
    torch.testing.assert_close(ours, logits)
    assert relative_difference(our_gradients, plain_gradients) < 1e-5


def test_what_is_used_of_transformers_is_still_there():
    assert grouped._grouped_mm is not None
    assert grouped._DEFAULT_GATE is not None
    assert all(map(grouped._has_plain_gate, experts_of(tiny("qwen3_moe", num_hidden_layers=1))))
    assert not any(map(grouped._has_plain_gate, experts_of(tiny("gpt_oss", num_hidden_layers=1))))
