import numpy as np
import pytest
import torch

from tiny_models import tiny
from upweight.rollout.graphs import GraphSteps
from upweight.rollout.in_process import InProcess
from upweight.types import Sampling


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
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
    sampler._steps.begin = GraphSteps(sampler._decoder, compiled=True).begin
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
