"""A way of sampling is believed when its log-probs are the model's own, and left for the next one when they are not."""

import logging

import pytest
import torch

from made_rollouts import online_trainer
from tiny_models import drawn, tiny
from upweight.errors import UserError
from upweight.sampler.check import CheckResult, TrialPrompts
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

PROMPTS = [drawn(1, 9).tolist(), drawn(2, 3).tolist()]
GREEDY = Sampling(max_new_tokens=10, temperature=0.0)


def forgetful(sampler: InProcess) -> None:
    """Have the sampler read each prompt's first token in place of its keys and values."""
    decoder = sampler._sampler._decoder
    advance = decoder.advance

    def wrong(width: int) -> None:
        for key, *_ in decoder.caches:
            key.zero_()
        advance(width)

    decoder.advance = wrong


def greedy(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_usual_model_shares_prompts_without_a_word(dtype: torch.dtype, caplog):
    sampler = InProcess(tiny("llama").to(dtype), end_ids=())
    sampler.generate(PROMPTS, 2, GREEDY)
    assert sampler.shares_prefixes
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_sampler_that_is_wrong_on_a_model_gives_way_to_generate(caplog):
    model = tiny("qwen3")
    sampler = InProcess(model, end_ids=())
    forgetful(sampler)
    out = sampler.generate(PROMPTS, 2, GREEDY)
    assert not sampler.shares_prefixes
    assert "the sampler that shares prompts gives log-probs that differ by" in caplog.text
    assert "sampled by transformers' generate, which is slower" in caplog.text
    for prompt, group in zip(PROMPTS, out, strict=True):
        assert [one.ids for one in group] == [greedy(model, prompt, 10)] * 2


def test_a_model_that_nothing_can_sample_is_refused_in_words(monkeypatch):
    model = tiny("mamba")
    sampler = InProcess(model, end_ids=())

    def fail(*args, **kwargs):
        raise ValueError("a state has the wrong shape\nand more")

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(UserError, match=r"(?s)cannot be sampled.*fails \(ValueError: a state has the wrong shape\)"):
        sampler.generate(PROMPTS, 1, GREEDY)


def test_ruined_weights_are_named_rather_than_the_sampler():
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        InProcess(model, end_ids=()).generate(PROMPTS, 1, GREEDY)


def test_all_ranks_take_the_way_of_the_one_that_fails():
    sampler = InProcess(tiny("mistral"), end_ids=())
    heard: list[CheckResult] = []

    def gather(own: CheckResult) -> list[CheckResult]:
        heard.append(own)
        return [own, CheckResult(2.0, own.tolerance)] if len(heard) == 1 else [own, own]

    sampler.check_sampling(PROMPTS, GREEDY, gather)
    assert [one.passed for one in heard] == [True, True]
    assert not sampler.shares_prefixes


def test_a_trial_reaches_as_far_as_a_call_may():
    trial = TrialPrompts.of(PROMPTS, Sampling(max_new_tokens=500, top_k=5, stop_ids=(7,)), 256)
    assert [len(prompt) for prompt in trial.prompts] == [9, 3, 256 - 24]
    assert (trial.sampling.max_new_tokens, trial.sampling.top_k, trial.sampling.stop_ids) == (24, 5, ())


def test_a_forced_last_token_of_the_models_is_not_sampled():
    model = tiny("mamba")
    model.generation_config.forced_eos_token_id = 2
    (one,) = InProcess(model, end_ids=()).generate([PROMPTS[0]], 1, GREEDY)[0]
    assert one.ids == greedy(model, PROMPTS[0], 10)
    assert model.generation_config.forced_eos_token_id == 2


def test_a_run_proves_its_sampler_before_the_first_rollout(tmp_path, caplog):
    rollouts = online_trainer(tmp_path).rollouts
    forgetful(rollouts.generator)
    rollouts.producer.produce(0)
    assert not rollouts.generator.shares_prefixes
