"""Prompts that are padded to one length, as graphs read them, against the same prompts as they are."""

import gc
import weakref

import pytest
import torch

from tiny_models import TREES, drawn, tiny
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

PROMPTS = [drawn(1, 9).tolist(), drawn(2, 1).tolist(), drawn(3, 17).tolist()]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("kind", TREES)
def test_padded_prompts_are_continued_as_they_are_alone(kind: str, penalty: float):
    sampler = InProcess(tiny(kind), end_ids=())
    asked = PROMPTS, 2, Sampling(max_new_tokens=6, seed=3, repetition_penalty=penalty)
    right = sampler.generate(*asked)
    decoder = sampler._decoder
    reads = 0

    def begin(prompts, uniform_BN, budget):
        nonlocal reads
        decoder.load(prompts, uniform_BN)
        decoder.pad(prompts)
        decoder.prefill_padded()
        reads += 1

    sampler._steps.begin = begin
    for _ in range(2):  # the second time over what the first left behind
        found = sampler.generate(*asked)
        assert [c.ids for group in found for c in group] == [c.ids for group in right for c in group]
        logps = [torch.tensor([c.logps for group in out for c in group]) for out in (found, right)]
        torch.testing.assert_close(*logps, atol=1e-4, rtol=1e-4)
    assert reads == 2


def test_a_sampler_that_is_gone_holds_no_model():
    model = tiny("llama")
    InProcess(model, end_ids=()).generate(PROMPTS, 1, Sampling(max_new_tokens=2, seed=0))
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
