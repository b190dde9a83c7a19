"""Every causal language model that transformers knows: sampled as `generate` and a plain forward say, or refused."""

import numpy as np
import pytest
import torch

from sweep.tiny import VOCABULARY, kinds, tiny_model
from upweight.errors import UserError
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, Sampling

NEW = 20
GREEDY = Sampling(max_new_tokens=NEW, temperature=0.0)
PROMPTS = [
    np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist() for seed, length in enumerate((9, 3, 17))
]


def plain_logps(model, prompt: list[int], completion: Completion) -> torch.Tensor:
    logits = model(torch.tensor([prompt + completion.ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]


def first_choice(model, prompt: list[int], completion: Completion) -> int:
    """How many tokens, from the first on, are those that a plain forward takes for most likely, up to rounding."""
    logits = model(torch.tensor([prompt + completion.ids]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    wrong = (logits.amax(1) - chosen > 1e-4).nonzero()
    return int(wrong[0]) if len(wrong) else len(completion.ids)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds())
def test_greedy_tokens_and_log_probs_are_the_models_own(kind: str, record_property):
    model = tiny_model(kind)
    try:
        sampler = InProcess(model, end_ids=())
        out = sampler.generate(PROMPTS, 2, GREEDY)
    except UserError as refused:
        record_property("way", f"refused: {refused}")
        return
    record_property("way", str(sampler._way))
    for prompt, group in zip(PROMPTS, out, strict=True):
        for completion in group:
            assert first_choice(model, prompt, completion) == NEW
            assert torch.allclose(torch.tensor(completion.logps), plain_logps(model, prompt, completion), atol=1e-4)
