"""Slots: the tokens of a sequence are those of the grid, whatever waits, leaves, or runs beside it."""

from itertools import chain

import numpy as np
import pytest
import torch

from tiny_models import drawn, tiny
from upweight.engine import Engine
from upweight.engine.routing import Routing, install_routing
from upweight.models.modules import dropout_off
from upweight.sampler.collect import CompletionCollector
from upweight.sampler.cuda_graphs import EagerSteps
from upweight.sampler.decode import Decoder
from upweight.sampler.forward import CachedForward
from upweight.sampler.grid_sampler import GridSampler
from upweight.sampler.pages import PAGE
from upweight.sampler.slot_sampler import SlotSampler
from upweight.sampler.slots import Slots
from upweight.types import Completion, Sampling

ENDS = range(60, 80)
BEGINNING = drawn(9, 2 * PAGE + 3).tolist()
PROMPTS = [drawn(1, 9).tolist(), drawn(2, 1).tolist(), [*BEGINNING, 1], [*BEGINNING, 2, 3], drawn(5, PAGE + 1).tolist()]
PLENTY = 1 << 30


def prepared(kind: str):
    """A tiny model whose logits the engine has set up."""
    model = tiny(kind).eval()
    Engine(model)
    return model


def slot_sampler(
    model, most_slots: int = 1024, prefill_tokens: int = 8192, records: Routing | None = None
) -> SlotSampler:
    forward = CachedForward(model, model.device, records=records)
    return SlotSampler(EagerSteps(Slots(forward)), prefill_tokens, most_slots)


def sampled(
    sampler, model, prompts, sampling: Sampling, count: int = 3, *, memory=PLENTY, **given
) -> list[list[Completion]]:
    rows = CompletionCollector(len(prompts), count, sampling.max_new_tokens, ENDS, **given)
    generator = torch.Generator().manual_seed(0)
    shape = (len(prompts) * count, sampling.max_new_tokens)
    uniform_SN = torch.rand(shape, generator=generator, dtype=torch.float64)
    with torch.no_grad(), dropout_off(model):
        sampler.sample(prompts, sampling, uniform_SN, rows, memory)
    assert not rows.alive_S.any()
    return [rows.completions(prompt) for prompt in range(len(prompts))]


def assert_equal(some: list[list[Completion]], others: list[list[Completion]]) -> None:
    for one, other in zip(chain(*some), chain(*others), strict=True):
        assert (one.ids, one.finished) == (other.ids, other.finished)
        assert np.allclose(one.logps, other.logps, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"repetition_penalty": 1.3, "temperature": 0.7}),
        ("mistral", {"top_p": 0.9}),
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("llama4_text", {}),
    ],
)
def test_slots_draw_what_the_grid_draws(kind, options):
    model = prepared(kind)
    sampling = Sampling(max_new_tokens=70, **options)
    expected = sampled(GridSampler(Decoder(CachedForward(model, model.device)), 8192), model, PROMPTS, sampling)
    assert len({len(one.ids) for one in chain(*expected)}) > 3, "lengths differ"
    assert_equal(sampled(slot_sampler(model), model, PROMPTS, sampling), expected)


def test_waiting_sequences_take_the_slots_of_those_that_end():
    model = prepared("llama")
    sampling = Sampling(max_new_tokens=40)
    prompts = PROMPTS * 3
    alone = sampled(slot_sampler(model), model, prompts, sampling, count=4)
    assert_equal(sampled(slot_sampler(model, 8, prefill_tokens=1), model, prompts, sampling, count=4), alone)


def test_without_room_a_sequence_waits_and_goes_on_with_the_same_tokens():
    model = prepared("llama")
    sampling = Sampling(max_new_tokens=3 * PAGE)
    sampler = slot_sampler(model)
    forward = sampler.slots.forward
    prompts = [drawn(seed, 5).tolist() for seed in range(4)]
    rows = CompletionCollector(4, 4, sampling.max_new_tokens)
    uniform_SN = torch.rand(
        16, sampling.max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    forgotten = slot_sampler(model)
    others = CompletionCollector(4, 4, sampling.max_new_tokens)
    with torch.no_grad(), dropout_off(model):
        sampler.sample(prompts, sampling, uniform_SN, rows, 20 * PAGE * forward.token_bytes())
        forgotten.sample(prompts, sampling, uniform_SN, others, PLENTY)
    assert sampler.prefilled_tokens > forgotten.prefilled_tokens, "some had to leave and be read again"
    assert_equal([rows.completions(p) for p in range(4)], [others.completions(p) for p in range(4)])


def test_a_later_turn_reads_only_its_new_tokens_until_the_weights_change():
    model = prepared("llama")
    sampling = Sampling(max_new_tokens=30)
    sampler = slot_sampler(model)
    first = sampled(sampler, model, [BEGINNING], sampling, count=1)
    assert sampler.prefilled_tokens == len(BEGINNING) - 1
    turn = [*BEGINNING, *first[0][0].ids, 4, 5, 6, 7]
    again = sampled(sampler, model, [turn], sampling, count=1)
    # The last token that was drawn and the new ones, of which the last is fed in the first step.
    assert sampler.prefilled_tokens == len(BEGINNING) - 1 + 4
    assert_equal(again, sampled(slot_sampler(model), model, [turn], sampling, count=1))
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    changed = sampled(sampler, model, [turn], sampling, count=1)
    assert sampler.prefilled_tokens == len(BEGINNING) - 1 + 4 + len(turn) - 1
    assert_equal(changed, sampled(slot_sampler(model), model, [turn], sampling, count=1))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_each_token_of_a_growing_conversation_is_read_once(kind):
    """Longer turns need larger tables and more pages, and what earlier turns read stays."""
    model = prepared(kind)
    routing = install_routing(model) if kind == "qwen3_moe" else None
    given = {} if routing is None else {"route_shape": (routing.layers, routing.top_k)}
    sampling, sampler = Sampling(max_new_tokens=40), slot_sampler(model, records=routing)
    turns, sizes, asked = [[*BEGINNING, number] for number in range(8)], set(), [70, 130, 190, 250, 0]
    for number, length in enumerate(asked):
        answers = sampled(sampler, model, turns, sampling, count=1, **given)
        sizes.add((sampler.cache.pages, sampler.slots.sizes.table))
        alone = sampled(slot_sampler(model, records=routing), model, turns, sampling, count=1, **given)
        assert_equal(answers, alone)
        if routing is not None:
            assert all(np.array_equal(a.routes, b.routes) for a, b in zip(chain(*answers), chain(*alone), strict=True))
        new = drawn(number, length).tolist()
        turns = [[*ids, *answer.ids, *new] for ids, (answer,) in zip(turns, answers, strict=True)]
    assert len(sizes) > 2
    # What is drawn is fed as it is drawn, but for the last token of an answer; the last of a prompt in the first step.
    assert sampler.prefilled_tokens == len(BEGINNING) + 8 * sum(asked)


@pytest.mark.parametrize("memory", [PLENTY, 1])
def test_slots_record_the_experts_of_prompts_and_completions(memory):
    model = prepared("qwen3_moe")
    routing = install_routing(model)
    given = {"route_shape": (routing.layers, routing.top_k)}
    sampling = Sampling(max_new_tokens=70)
    grid = GridSampler(Decoder(CachedForward(model, model.device, records=routing)), 8192)
    expected = sampled(grid, model, PROMPTS, sampling, **given)
    # Few slots, and with little memory few pages: sequences wait, and prefixes are read from pages or fed again.
    slots = slot_sampler(model, most_slots=8, prefill_tokens=64, records=routing)
    for _ in range(2):  # the second time prompts are in the cache
        assert_same_routes(sampled(slots, model, PROMPTS, sampling, memory=memory, **given), expected)
    longer = [[*PROMPTS[3], *expected[3][0].ids[:-1]], PROMPTS[0]]  # a later turn, over pages that steps wrote
    later = sampled(slots, model, longer, sampling, memory=memory, **given)
    assert_same_routes(later, sampled(grid, model, longer, sampling, **given))


def assert_same_routes(some: list[list[Completion]], others: list[list[Completion]]) -> None:
    assert_equal(some, others)
    for one, other in zip(chain(*some), chain(*others), strict=True):
        assert one.routes is not None
        assert np.array_equal(one.routes, other.routes)
