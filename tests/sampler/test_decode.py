"""The memory of a sampler ends with it."""

import gc
import weakref

from tiny_models import drawn, tiny
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

PROMPTS = [drawn(1, 9).tolist(), drawn(2, 1).tolist(), drawn(3, 17).tolist()]


def test_a_sampler_that_is_gone_holds_no_model():
    model = tiny("llama")
    InProcess(model, end_ids=()).generate(PROMPTS, 1, Sampling(max_new_tokens=2, seed=0))
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
