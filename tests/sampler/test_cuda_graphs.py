import contextlib

import numpy as np
import pytest
import torch

from tiny_models import tiny
from upweight.sampler.cuda_graphs import GraphSteps
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_prompts_go_through_layers_that_are_compiled_for_any_length_and_touch_the_device_alone(kind, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward

    torch.compiler.reset()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=backend, **options))
    sampler = InProcess(tiny(kind), end_ids=())
    drawn = [np.random.default_rng(length).integers(1, 50, (2, length)).tolist() for length in (40, 31, 22, 57)]
    asked = [(prompts, 2, Sampling(max_new_tokens=1, seed=0)) for prompts in drawn]
    asked += [(drawn[0], 2, Sampling(max_new_tokens=1, seed=0, temperature=heat)) for heat in (0.7, 0.9)]
    right = [sampler.generate(*call) for call in asked]
    steps = GraphSteps(sampler._decoder, compiled=True)
    steps._capturable.clear()
    sampler._steps.begin = steps.begin
    found, counts = [], []
    for call in asked:
        found.append(sampler.generate(*call))
        counts.append(len(graphs))
    assert [[c.ids for g in out for c in g] for out in found] == [[c.ids for g in out for c in g] for out in right]
    assert counts[0] > 0
    assert counts[len(drawn) - 1] == counts[0]
    # the temperature, an epsilon or a scaling would be a tensor on the CPU
    assert not [value for values in graphs for value in values if isinstance(value, torch.Tensor) and value.dim() == 0]
    torch.compiler.reset()


@pytest.mark.parametrize("error", [RuntimeError("made up"), torch.OutOfMemoryError("made up")])
def test_prompts_are_read_without_a_graph_where_none_can_be_recorded_and_the_warning_names_them(error, monkeypatch):
    @contextlib.contextmanager
    def fails(graph, **options):
        raise error
        yield

    warnings = []
    monkeypatch.setattr("upweight.sampler.cuda_graphs.warn_once", warnings.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    sampler = InProcess(tiny("llama"), end_ids=())
    call = ([[5, 6, 7], [8, 9, 10, 11]], 2, Sampling(max_new_tokens=1, seed=0))
    right = sampler.generate(*call)
    steps = GraphSteps(sampler._decoder, compiled=False)
    sampler._steps.begin = steps.begin
    found = sampler.generate(*call)
    assert [[c.ids for c in group] for group in found] == [[c.ids for c in group] for group in right]
    assert [line.partition(",")[0] for line in warnings] == [
        "the prefill of LlamaForCausalLM cannot be recorded as a CUDA graph"
    ]
    assert steps._capturable == {"step"}
