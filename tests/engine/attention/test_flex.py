import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dense_attention import dense_attention, dense_mask
from tiny_models import gradients, group, plain_statistics, relative_difference, tiny, weighted
from upweight.engine import Engine
from upweight.engine.attention.flex import BLOCK_TOKENS, block_tables, flex_tree_attention, tree_block_mask
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.engine.packing import build_batch, whole_blocks
from upweight.errors import UserError
from upweight.types import Sample, Unit

RULES = [Rule(), Rule(window=40), Rule(window=1000), Rule(chunk=64)]


def forest(seed, length=None):
    """Ends and positions of a row of trees whose segments cross, fill and fall short of blocks."""
    rng = np.random.default_rng(seed)
    units = []
    for _ in range(3):
        prompt = rng.integers(3, 80, rng.integers(1, 300))
        for _ in range(rng.integers(1, 4)):
            ids = np.concatenate([prompt, rng.integers(3, 80, rng.integers(1, 200))])
            units.append(Unit((Sample(ids=ids, loss_mask=np.ones(len(ids), bool)),)))
    batch = build_batch(units, pad_to=whole_blocks if length is None else lambda n: n + length)
    return batch.end_BN[0], batch.position_BN[0]


def by_block(seen):
    """Whether some and whether all of each block of a token-by-token mask is set."""
    blocks = -(-len(seen) // BLOCK_TOKENS)
    padded = torch.zeros(blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS, dtype=torch.bool)
    padded[: len(seen), : len(seen)] = seen
    tiles = padded.view(blocks, BLOCK_TOKENS, blocks, BLOCK_TOKENS)
    return tiles.any(3).any(1), tiles.all(3).all(1)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_block_tables_cover_the_dense_mask(rule, seed):
    end_N, position_N = forest(seed)
    partial, full = block_tables(end_N, position_N, rule)
    some, every = by_block(dense_mask(end_N, position_N, rule))
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert not (full & ~every).any()
    if rule == Rule():
        diagonal = torch.eye(len(some), dtype=torch.bool)
        assert torch.equal(partial | full, some | diagonal)
        assert torch.equal(full, every & ~diagonal)


def test_windows_leave_far_blocks_out():
    length = 10 * BLOCK_TOKENS
    partial, full = block_tables(torch.full((length,), length), torch.arange(length), Rule(window=BLOCK_TOKENS))
    assert int((partial | full).sum(1).max()) == 2


def test_rows_need_not_fill_their_last_block():
    end_N, position_N = forest(1, length=0)
    assert len(end_N) % BLOCK_TOKENS
    partial, full = block_tables(end_N, position_N, Rule())
    some, _ = by_block(dense_mask(end_N, position_N, Rule()))
    assert torch.equal(partial | full, some)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_block_mask_attends_as_the_dense_mask_does(rule):
    end_N, position_N = forest(2)
    mask = tree_block_mask(end_N, position_N, rule)
    partial, full = block_tables(end_N, position_N, rule)
    assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, len(end_N), 16) for heads in (4, 2, 2))
    ours = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
    dense = dense_attention(q, k, v, dense_mask(end_N, position_N, rule), scaling=0.3)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)


def test_two_lengths_are_compiled_for_each_rule_and_then_none():
    compiled = torch.compile(flex_attention, fullgraph=True, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for length, prompt in [(1024, 100), (1024, 130), (1152, 300), (896, 100), (2048, 500), (896, 101)]:
        batch = build_batch(long_group(0, prompt), pad_to=lambda n, length=length: length)
        q = torch.randn(1, 2, length, 16)
        for rule in (Rule(), Rule(window=40)):
            compiled(q, q, q, block_mask=tree_block_mask(batch.end_BN[0], batch.position_BN[0], rule))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [2, 2, 4, 4, 4, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True)])
def test_compiled_attention_matches_the_dense_mask(rule, softcap, with_sinks):
    end_N, position_N = (x.cuda() for x in forest(3))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, len(end_N), 64, device="cuda", requires_grad=True) for heads in (12, 2, 2))
    sinks = torch.randn(12, device="cuda", requires_grad=True) if with_sinks else None
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    ours = flex_tree_attention(
        q, k, v, tree_block_mask(end_N, position_N, rule), AttentionParams(rule, 0.2, softcap, sinks)
    )
    seen = dense_mask(end_N.cpu(), position_N.cpu(), rule).cuda()
    right_sinks = None if sinks is None else sinks.double()
    dense = dense_attention(*(x.double() for x in (q, k, v)), seen, scaling=0.2, softcap=softcap, sinks=right_sinks)
    torch.testing.assert_close(ours.double(), dense, atol=5e-3, rtol=5e-3)
    pull = torch.randn_like(ours)
    found, right = torch.autograd.grad(ours, leaves, pull), torch.autograd.grad(dense, leaves, pull.double())
    for a, b in zip(found, right, strict=True):
        assert float((a - b).abs().max()) < 1e-2 * float(b.abs().max())


def long_group(seed, prompt=200, sizes=(150, 90, 260)):
    return group(prompt, tuple(size + seed for size in sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_trees_on_a_gpu_equal_sequences(kind):
    sizes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 1024}
    model = tiny(kind, **sizes).cuda()
    units = long_group(0)
    batch = build_batch(units, pad_to=whole_blocks).to("cuda")
    plain = {name: value.cpu() for name, value in plain_statistics(model, units).items()}
    right = gradients(model, weighted(plain))
    engine = Engine(model)
    out = engine(model, batch, frozenset({"entropy_T"}))
    found = {"logps_T": out.logps_T.cpu(), "entropy_T": out.entropy_T.cpu()}
    for name, value in found.items():
        torch.testing.assert_close(value, plain[name], atol=2e-3, rtol=0)
    assert relative_difference(gradients(model, weighted(found)), right) < 5e-3


@pytest.mark.gpu
def test_bfloat16_stays_near_float32():
    model = tiny("llama", hidden_size=64, head_dim=16, max_position_embeddings=1024).cuda()
    units = long_group(0)
    plain = plain_statistics(model, units)["logps_T"]
    engine = Engine(model.bfloat16())
    out = engine(model, build_batch(units, pad_to=whole_blocks).to("cuda"))
    own = plain_statistics(model, units)["logps_T"]
    assert float((out.logps_T - plain).abs().mean()) < 1.5 * float((own - plain).abs().mean()) + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_nothing_is_compiled_after_warm_up(kind):
    model = tiny(kind, hidden_size=64, head_dim=16, max_position_embeddings=4096).cuda().train()
    engine = Engine(model)

    lengths = set()

    def step(seed):
        batch = build_batch(long_group(seed), pad_to=whole_blocks).to("cuda")
        lengths.add(batch.ids_BN.shape[1])
        out = engine(model, batch, frozenset({"entropy_T"}), temperature=0.7)
        (out.logps_T.sum() + out.entropy_T.sum()).backward()

    step(0)
    step(30)
    step(60)
    assert len(lengths) > 1
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    for seed in range(70, 200, 13):
        step(seed)
    assert len(lengths) > 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_heads_too_narrow_for_a_gpu_are_named_with_the_remedy():
    end_N, position_N = forest(0)
    mask = tree_block_mask(end_N, position_N, Rule())
    heads = torch.zeros(1, 2, len(end_N), 8)
    with pytest.raises(UserError, match=r"width 8, and prefix trees on a GPU need 16\. Set `layout: padded`"):
        flex_tree_attention(heads, heads, heads, mask, AttentionParams(Rule(), scaling=1.0))
