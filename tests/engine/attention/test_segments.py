import pytest
import torch

from dense_attention import dense_attention, dense_mask
from tiny_models import SHAPES
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.engine.attention.segments import SegmentPlan, segment_attention
from upweight.engine.packing import build_batch

RULES = [Rule(), Rule(window=1), Rule(window=4), Rule(window=300), Rule(chunk=3), Rule(chunk=8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True)])
def test_segments_attend_as_the_dense_mask_does(shape, rule, softcap, with_sinks):
    batch = build_batch(SHAPES[shape](), pad_to=lambda n: n + 3)
    end_N, position_N = batch.end_BN[0], batch.position_BN[0]
    torch.manual_seed(0)
    q = torch.randn(1, 4, len(end_N), 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 2, len(end_N), 8, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 2, len(end_N), 6, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    ours = segment_attention(
        q, k, v, SegmentPlan.of(end_N, position_N, rule), AttentionParams(rule, 0.7, softcap, sinks)
    )
    dense = dense_attention(q, k, v, dense_mask(end_N, position_N, rule), scaling=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    pull = torch.randn_like(dense)
    for a, b in zip(torch.autograd.grad(ours, leaves, pull), torch.autograd.grad(dense, leaves, pull), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_long_segments_under_a_window_see_only_what_is_near():
    length = 2000
    end_N, position_N = torch.full((length,), length), torch.arange(length)
    plan = SegmentPlan.of(end_N, position_N, Rule(window=100))
    assert sum(plan.sizes) == length
    assert max(sum(plan.sizes[i] for i in keys) for call in plan.calls for keys in call.keys) <= 2 * 256
    q = torch.randn(1, 1, length, 4)
    ours = segment_attention(q, q, q, plan, AttentionParams(Rule(), 1.0))
    dense = dense_attention(q, q, q, dense_mask(end_N, position_N, Rule(window=100)))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)


def test_padding_is_one_call():
    end_N = torch.arange(1, 65)
    plan = SegmentPlan.of(end_N, torch.zeros(64, dtype=torch.long), Rule())
    assert [len(call.segments) for call in plan.calls] == [64]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_without_queries_are_keys_only(shape, rule):
    batch = build_batch(SHAPES[shape](), pad_to=lambda n: n)
    end_N, position_N = batch.end_BN[0], batch.position_BN[0]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, len(end_N), 8, dtype=torch.float64) for heads in (4, 2, 2))
    # As where an earlier turn is cached: the beginnings of paths have no queries, up to the middle of a segment.
    queried_N = (position_N >= 3).numpy()
    plan = SegmentPlan.of(end_N, position_N, rule, queried_N)
    ours = segment_attention(q[:, :, queried_N], k, v, plan, AttentionParams(rule, 0.7))
    dense = dense_attention(q, k, v, dense_mask(end_N, position_N, rule), scaling=0.7)
    torch.testing.assert_close(ours, dense[:, :, queried_N], atol=1e-5, rtol=1e-5)
    assert sum(plan.sizes[segment] for segment in plan.queried) == queried_N.sum()


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 64), (12, 2, 128), (6, 3, 40)])
def test_new_tokens_of_long_paths_attend_without_a_mask(heads, key_heads, width):
    torch.manual_seed(0)
    end_N, position_N = torch.full((900,), 900), torch.arange(900)
    q, k, v = (
        torch.randn(1, n, 900, width, device="cuda", dtype=torch.bfloat16) for n in (heads, key_heads, key_heads)
    )
    queried_N = (position_N >= 611).numpy()
    plan = SegmentPlan.of(end_N, position_N, Rule(), queried_N)
    ours = segment_attention(q[:, :, 611:], k, v, plan, AttentionParams(Rule(), 0.2))
    assert "visible_QK" not in vars(plan.calls[0]), "a mask was made"
    dense = dense_attention(q.float(), k.float(), v.float(), dense_mask(end_N, position_N, Rule()).cuda(), scaling=0.2)
    torch.testing.assert_close(ours.float(), dense[:, :, 611:], atol=2e-2, rtol=2e-2)
