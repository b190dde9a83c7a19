"""How the work of slots is launched: compiled for any length, recorded as graphs, and plainly where neither can be."""

import contextlib

import numpy as np
import pytest
import torch

from tiny_models import tiny
from upweight.engine import Engine
from upweight.models.modules import dropout_off
from upweight.sampler.cuda_graphs import GraphSteps
from upweight.sampler.forward import CachedForward
from upweight.sampler.pages import PAGE
from upweight.sampler.slots import Prefix, Slots, SlotSizes
from upweight.types import Sampling

SIZES = SlotSizes(slots=16, pages=9, table=2, new_tokens=4)


def opened(kind: str, **sampling: float) -> Slots:
    """Slots with two of eight sequences at their first token, and the pages of both prefilled by nobody yet."""
    model = tiny(kind).eval()
    Engine(model)
    slots = Slots(CachedForward(model, model.device))
    slots.open(SIZES, Sampling(max_new_tokens=4, **sampling))
    slots.size = 8
    return slots


def drawn_tokens(slots: Slots, prefill, step, lengths: tuple[int, int]) -> list[list[int]]:
    """The tokens of two prompts of these lengths, by some way of launching."""
    ids = [np.random.default_rng(length).integers(1, 50, length).tolist() for length in lengths]
    table = np.zeros((8, 2), np.int32)
    table[:2] = [[1, 2], [3, 4]]
    slots.set_table(table)
    slots.column_1.zero_()
    with torch.no_grad(), dropout_off(slots.forward.base):
        prefill([Prefix(one[:-1], 0, pages) for one, pages in zip(ids, ([1, 2], [3, 4]), strict=True)])
        state = np.array([[one[-1], len(one) - 1, 0, 4, 0] for one in ids]).T
        slots.place([0, 1], state, torch.full((2, 4), 0.37, dtype=torch.float64))
        for _ in range(4):
            step()
    return slots.ids_KB[:4, :2].T.tolist()


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_layers_are_compiled_once_for_any_length_and_touch_the_device_alone(kind, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward

    torch.compiler.reset()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=backend, **options))
    slots = opened(kind, temperature=0.7)
    asked = [(40, 31), (22, 57), (PAGE, 9)]
    right = [drawn_tokens(slots, slots.prefill, slots.step, lengths) for lengths in asked]
    steps = GraphSteps(slots, compiled=True)
    steps._capturable = False
    found, counts = [], []
    for lengths in asked:
        found.append(drawn_tokens(slots, steps.prefill, steps._step, lengths))
        counts.append(len(graphs))
    slots.size = 16
    steps._step()
    assert found == right
    assert 0 < counts[0] == counts[-1]
    # the temperature, an epsilon or a scaling would be a tensor on the CPU
    assert not [value for values in graphs for value in values if isinstance(value, torch.Tensor) and value.dim() == 0]
    torch.compiler.reset()


@pytest.mark.parametrize("error", [RuntimeError("made up"), torch.OutOfMemoryError("made up")])
def test_steps_go_on_without_a_graph_where_none_can_be_recorded_and_the_warning_names_the_model(error, monkeypatch):
    @contextlib.contextmanager
    def fails(graph, **options):
        raise error
        yield

    warnings = []
    monkeypatch.setattr("upweight.sampler.cuda_graphs.warn_once", warnings.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    slots = opened("llama")
    right = drawn_tokens(slots, slots.prefill, slots.step, (5, 70))
    steps = GraphSteps(slots, compiled=False)
    assert drawn_tokens(slots, steps.prefill, steps._step, (5, 70)) == right
    assert steps.compile_seconds > 0
    assert [line.partition(",")[0] for line in warnings] == [
        "the steps of LlamaForCausalLM cannot be recorded as a CUDA graph"
    ]
