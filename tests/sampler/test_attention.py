"""Attention over a shared prompt and a completion, or over pages, is attention over all tokens laid end to end."""

import pytest
import torch

from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.sampler.attention import Rotation, cascade_attention, paged_attention
from upweight.sampler.decode import Decoder, Grid
from upweight.sampler.pages import PAGE

GROUPS, MEMBERS, KEY_HEADS, REPEAT, WIDTH, PROMPT, ROOM = 2, 3, 2, 3, 24, 130, 80
SLOTS = GROUPS * MEMBERS
PARAMS = {
    "plain": AttentionParams(Rule(), 0.3),
    "window": AttentionParams(Rule(window=20), 0.3),
    "narrowest window": AttentionParams(Rule(window=1), 0.3),
    "chunk": AttentionParams(Rule(chunk=33), 0.3),
    "cap": AttentionParams(Rule(), 0.3, softcap=2.0),
    "all": AttentionParams(Rule(window=9), 0.3, softcap=2.0, sinks=torch.linspace(-1, 2, KEY_HEADS * REPEAT)),
}


def made(step: int, value_width: int, device: str = "cpu"):
    """Query, key, value of the newest tokens, the caches before them, prompt lengths and the step."""
    generator = torch.Generator().manual_seed(step)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    tokens = (normal(SLOTS, KEY_HEADS * REPEAT, 1, WIDTH), normal(SLOTS, KEY_HEADS, 1, WIDTH))
    value = normal(SLOTS, 1, KEY_HEADS, value_width).transpose(1, 2)
    caches = tuple(
        normal(count, KEY_HEADS, length, width)
        for count, length in ((GROUPS, PROMPT), (SLOTS, ROOM))
        for width in (WIDTH, value_width)
    )
    lengths = torch.tensor([[PROMPT], [5]], device=device)
    return (*tokens, value), caches, lengths, torch.tensor([step], device=device)


def expected(params: AttentionParams, tokens, caches, lengths, step) -> torch.Tensor:
    """Each slot alone, its keys laid end to end."""
    out = []
    for slot in range(SLOTS):
        group, count = slot // MEMBERS, int(step)
        length = int(lengths[group])
        joined = [
            torch.cat([caches[part][group][:, :length], caches[part + 2][slot][:, :count], tokens[part + 1][slot]], 1)
            for part in (0, 1)
        ]
        key, value = (x.double().repeat_interleave(REPEAT, 0) for x in joined)
        scores = (tokens[0][slot].double() @ key.transpose(1, 2)) * params.scaling
        if params.softcap:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        at, position = length + count, torch.arange(length + count + 1, device=scores.device)
        if params.rule.window:
            scores = scores.masked_fill(at - position >= params.rule.window, -torch.inf)
        if params.rule.chunk:
            scores = scores.masked_fill(at // params.rule.chunk != position // params.rule.chunk, -torch.inf)
        if params.sinks is not None:
            scores = torch.cat([scores, params.sinks.to(scores)[:, None, None]], -1)
        out.append(scores.softmax(-1)[..., : length + count + 1] @ value)
    return torch.stack(out).float()


@pytest.mark.parametrize("step", [0, 1, 64, 70])
@pytest.mark.parametrize("value_width", [16, WIDTH])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_products(params: AttentionParams, value_width: int, step: int):
    (query, key, value), caches, lengths, at = made(step, value_width)
    right = expected(params, (query, key, value), caches, lengths, at)
    decoder = Decoder.__new__(Decoder)
    decoder.grid, decoder.device = Grid(GROUPS, MEMBERS, PROMPT, ROOM), torch.device("cpu")
    decoder.length_G1, decoder.step_1 = lengths, at
    caches[2].index_copy_(2, at, key)
    caches[3].index_copy_(2, at, value)
    new = [cache[:, :, : step + 1] for cache in caches[2:]]
    bias_GMK = decoder.bias(params.rule, step + 1)
    found = cascade_attention(query, (caches[0], caches[1], new[0], new[1]), bias_GMK, params)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def paged(tokens, caches, lengths, step):
    """The same keys in pages: pools of keys and values, each slot's pages in some order, and its newest position."""
    position_S = (lengths[:, 0].repeat_interleave(MEMBERS) + step).tolist()
    width = max(position_S) // PAGE + 1
    order = torch.randperm(SLOTS * width, generator=torch.Generator().manual_seed(0)) + 1
    table_ST = order.view(SLOTS, width).int().to(lengths.device)
    pools = []
    for part in (0, 1):
        pool = torch.full((SLOTS * width + 1, KEY_HEADS, PAGE, caches[part].shape[-1]), 7.0, device=lengths.device)
        for slot, position in enumerate(position_S):
            length = int(lengths[slot // MEMBERS])
            keys = torch.cat([caches[part][slot // MEMBERS][:, :length], caches[part + 2][slot][:, : int(step)]], 1)
            for at in range(position):
                pool[table_ST[slot, at // PAGE], :, at % PAGE] = keys[:, at]
        pools.append(pool)
    return (pools[0], pools[1]), table_ST, torch.tensor(position_S, device=lengths.device)


@pytest.mark.parametrize("step", [0, 70])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_pages(params: AttentionParams, step: int):
    tokens, caches, lengths, at = made(step, 16)
    right = expected(params, tokens, caches, lengths, at)
    pools, table_ST, position_S = paged(tokens, caches, lengths, at)
    page_S = table_ST.long().gather(1, position_S[:, None] // PAGE)[:, 0]
    for pool, new in zip(pools, tokens[1:], strict=True):
        pool[page_S, :, position_S % PAGE] = new[:, :, 0]
    found = paged_attention(tokens[0], pools, table_ST, position_S, params)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 256], ids=["as of many slots", "as of few"])
@pytest.mark.parametrize("step", [0, 1, 64, 70])
@pytest.mark.parametrize("value_width", [16, WIDTH])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_kernel(params: AttentionParams, value_width: int, step: int, programs: int, monkeypatch):
    from upweight.sampler.kernels import paged_attention as attention_kernel

    monkeypatch.setattr(attention_kernel, "_PROGRAMS", programs)
    monkeypatch.setattr(attention_kernel, "_KEYS", 32)
    tokens, caches, lengths, at = made(step, value_width, "cuda")
    sinks = None if params.sinks is None else params.sinks.cuda()
    params = AttentionParams(params.rule, params.scaling, params.softcap, sinks)
    right = expected(params, tokens, caches, lengths, at)
    pools, table_ST, position_S = paged(tokens, caches, lengths, at)
    for _ in range(2):  # counters are left as they were
        found = attention_kernel.paged_step(*tokens, pools, (table_ST, position_S), params)
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    page_S = table_ST.long().gather(1, position_S[:, None] // PAGE)[:, 0]
    for pool, new in zip(pools, tokens[1:], strict=True):
        assert torch.equal(pool[page_S, :, position_S % PAGE], new[:, :, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("step", [0, 70])
def test_kernel_norms_and_rotates_queries_and_keys(step: int, normed: bool):
    from upweight.sampler.kernels.paged_attention import paged_step

    (query, key, value), caches, lengths, at = made(step, WIDTH, "cuda")
    angle_S1H = torch.linspace(0, 6, SLOTS * (WIDTH // 2), device="cuda").view(SLOTS, 1, -1)
    cos, sin = (torch.cat([x, x], -1) for x in (angle_S1H.cos(), angle_S1H.sin()))
    weights = [torch.rand(WIDTH, device="cuda") for _ in range(2)]
    ready = []
    for x, weight in zip((query, key), weights, strict=True):
        normal = torch.nn.functional.rms_norm(x, (WIDTH,), weight, 1e-6) if normed else x
        first, second = normal.chunk(2, -1)
        ready.append(normal * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None])
    right = expected(PARAMS["plain"], (*ready, value), caches, lengths, at)
    pools, table_ST, position_S = paged((query, key, value), caches, lengths, at)
    rotation = Rotation(cos, sin, *(weights if normed else (None, None)), 1e-6)
    found = paged_step(query, key, value, pools, (table_ST, position_S), PARAMS["plain"], rotation)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)
    page_S = table_ST.long().gather(1, position_S[:, None] // PAGE)[:, 0]
    torch.testing.assert_close(pools[0][page_S, :, position_S % PAGE], ready[1][:, :, 0], atol=1e-5, rtol=1e-5)
