"""Sampling in process: its log-probs are the training forward's, its completions what a plain loop would sample."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from made_tokenizers import byte_tokenizer
from tiny_models import PADDED, SIZES, TREES, TREES_TOO, VOCABULARY, drawn, sample, tiny
from upweight.engine import Engine
from upweight.engine.activations import enable_checkpointing
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.models.modules import dropout_off
from upweight.models.precision import set_up_precision
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, Sampling, Unit

PROMPTS = [drawn(1, 9).tolist(), drawn(2, 1).tolist(), drawn(3, 17).tolist(), [*drawn(1, 9).tolist(), 5]]
LINEAR = r".*\.(q|k|v|o|qkv|in|x)_proj|.*\.(fc1|fc2)"
SAMPLING = Sampling(max_new_tokens=12, temperature=0.8, seed=3)


def with_lora(model):
    adapted = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=LINEAR))
    generator = torch.Generator().manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    return adapted


def flat(out: list[list[Completion]]) -> list[Completion]:
    return [completion for group in out for completion in group]


def trained_logps(engine: Engine, model, prompts, out, temperature: float) -> torch.Tensor:
    units = [
        Unit((sample(np.array(prompt), np.array(completion.ids), prompt=len(prompt)),))
        for prompt, group in zip(prompts, out, strict=True)
        for completion in group
    ]
    with torch.no_grad(), dropout_off(model):
        batch = build_batch(units, engine.layout).to(next(model.parameters()).device)
        found = engine(model, batch, temperature=temperature).logps_T
    assert found is not None
    return found.cpu()


def largest_difference(engine: Engine, model, prompts, out, temperature: float = 0.8) -> float:
    sampled = torch.tensor([logp for completion in flat(out) for logp in completion.logps])
    return float((sampled - trained_logps(engine, model, prompts, out, temperature)).abs().max())


@pytest.mark.parametrize(
    ("kind", "adapted"),
    [(kind, False) for kind in TREES + TREES_TOO + PADDED]
    + [
        pytest.param(kind, True, marks=[] if kind == "llama" else pytest.mark.slow)
        for kind in TREES + TREES_TOO + PADDED
    ],
)
def test_log_probs_equal_the_training_forward(kind: str, adapted: bool):
    model = with_lora(tiny(kind)) if adapted else tiny(kind)
    engine = Engine(model)
    model.train()
    out = InProcess(model, engine=engine).generate(PROMPTS, 3, SAMPLING)
    assert all(module.training for module in model.modules())
    assert [len(group) for group in out] == [3] * 4
    assert largest_difference(engine, model, PROMPTS, out) < 1e-4
    assert len({tuple(completion.ids) for completion in flat(out)}) > 8
    for completion in flat(out):
        assert completion.finished == (completion.ids[-1] == 2)
        assert completion.finished or len(completion.ids) == 12
        assert 2 not in completion.ids[:-1]


@pytest.mark.parametrize(
    "kind", ["mistral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gemma2", "mamba"))]
)
def test_greedy_completions_are_those_of_generate(kind: str):
    model = tiny(kind)
    out = InProcess(model).generate(PROMPTS, 1, Sampling(max_new_tokens=20, temperature=0.0))
    for prompt, (completion,) in zip(PROMPTS, out, strict=True):
        given = torch.tensor([prompt])
        expected = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False)
        assert completion.ids == expected[0, len(prompt) :].tolist()


def test_equal_seeds_give_equal_completions_whatever_else_is_sampled():
    sampler = InProcess(tiny("llama"))
    first = sampler.generate(PROMPTS, 3, SAMPLING)
    assert [c.ids for c in flat(sampler.generate(PROMPTS, 3, SAMPLING))] == [c.ids for c in flat(first)]
    alone = sampler.generate(PROMPTS[:1], 3, SAMPLING)
    assert [c.ids for c in alone[0]] == [c.ids for c in first[0]]
    other = sampler.generate(PROMPTS, 3, dataclasses.replace(SAMPLING, seed=4))
    assert [c.ids for c in flat(other)] != [c.ids for c in flat(first)]


def test_a_completions_own_seed_decides_alone_what_is_sampled():
    sampler = InProcess(tiny("llama"), end_ids=[])
    seeds = tuple(range(20, 28))
    whole = flat(sampler.generate(PROMPTS, 2, dataclasses.replace(SAMPLING, seeds=seeds)))
    short = dataclasses.replace(SAMPLING, max_new_tokens=5, seeds=(seeds[5],))
    (alone,) = flat(sampler.generate([PROMPTS[2]], 1, short))
    assert alone.ids == whole[5].ids[:5]
    others = flat(sampler.generate(PROMPTS, 2, dataclasses.replace(SAMPLING, seeds=seeds[::-1])))
    assert [one.ids for one in whole] != [one.ids for one in others]


def test_without_a_seed_the_global_generator_decides():
    sampler = InProcess(tiny("llama"))
    free = dataclasses.replace(SAMPLING, seed=None)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append([c.ids for c in flat(sampler.generate(PROMPTS, 2, free))])
    assert found[0] == found[1] != found[2]


def test_turns_and_chunks_change_nothing():
    model = tiny("qwen2")
    whole = InProcess(model).generate(PROMPTS, 3, SAMPLING)
    cut = InProcess(model, cache_bytes=1, prefill_tokens=4).generate(PROMPTS, 3, SAMPLING)
    assert [c.ids for c in flat(cut)] == [c.ids for c in flat(whole)]


def test_shrinking_grids_keep_every_row_in_its_place():
    model = tiny("gemma3_text")
    engine = Engine(model)
    # many ends, so that rows finish all along
    sampler = InProcess(model, engine=engine, end_ids=range(3, 12))
    heard: dict[int, list[Completion]] = {}
    out = sampler.generate(PROMPTS * 2, 5, dataclasses.replace(SAMPLING, max_new_tokens=40), heard.__setitem__)
    assert largest_difference(engine, model, PROMPTS * 2, out) < 1e-4
    lengths = {len(completion.ids) for completion in flat(out)}
    assert len(lengths) > 8
    assert [heard[number] for number in range(8)] == out
    assert list(heard) != sorted(heard)


def test_the_repetition_penalty_covers_prompt_and_completion():
    model = tiny("llama")
    settings = Sampling(max_new_tokens=30, temperature=0.0, repetition_penalty=1e6)
    out = InProcess(model, end_ids=()).generate(PROMPTS, 2, settings)
    logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert logits.max() > 0, "a penalty can only divide what is positive"
    for prompt, group in zip(PROMPTS, out, strict=True):
        given = torch.tensor([prompt])
        expected = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=30,
            do_sample=False,
            repetition_penalty=1e6,
            eos_token_id=VOCABULARY,
        )
        assert group[0].ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_stops(kind: str):
    tokenizer = byte_tokenizer()
    model = tiny(kind, vocab_size=len(tokenizer))
    sampler = InProcess(model, tokenizer)
    free = sampler.generate([[5, 6, 7]], 2, Sampling(max_new_tokens=20, seed=1))
    middle = flat(free)[0].ids[5]
    by_id = sampler.generate([[5, 6, 7]], 2, Sampling(max_new_tokens=20, seed=1, stop_ids=(middle,)))
    assert flat(by_id)[0].ids == flat(free)[0].ids[: flat(free)[0].ids.index(middle) + 1]
    assert flat(by_id)[0].finished
    text = tokenizer.decode(flat(free)[0].ids[4:6])
    by_text = sampler.generate([[5, 6, 7]], 2, Sampling(max_new_tokens=20, seed=1, stop_strings=(text,)))
    assert flat(by_text)[0].ids == flat(free)[0].ids[:6]
    assert flat(by_text)[0].finished


def test_weights_that_change_in_place_are_sampled_from():
    model = with_lora(tiny("llama"))
    set_up_precision(model, torch.float32)
    engine = Engine(model)
    sampler = InProcess(model, engine=engine)
    before = sampler.generate(PROMPTS, 2, SAMPLING)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.mul_(-1.5)
    sampler.sync(7)
    after = sampler.generate(PROMPTS, 2, SAMPLING)
    assert sampler.version() == 7
    assert {v for c in flat(after) for v in c.versions} == {7}
    assert {v for c in flat(before) for v in c.versions} == {0}
    assert [c.ids for c in flat(before)] != [c.ids for c in flat(after)]
    assert largest_difference(engine, model, PROMPTS, after) < 1e-4


def test_training_goes_on_after_sampling():
    """Gradient checkpointing, bfloat16 copies of float32 masters: sampling reads the copies and poisons nothing."""
    model = with_lora(tiny("llama").bfloat16())
    copies = set_up_precision(model, torch.bfloat16)
    assert copies is not None
    engine = Engine(model)
    enable_checkpointing(model)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    copies.follow(optimizer)
    sampler = InProcess(model, engine=engine)
    for _ in range(2):
        out = sampler.generate(PROMPTS, 2, SAMPLING)
        sampled = torch.tensor([logp for completion in flat(out) for logp in completion.logps])
        difference = (sampled - trained_logps(engine, model, PROMPTS, out, 0.8)).abs()
        assert difference.mean() < 0.15, "bfloat16 with large weights"
        model.train()
        units = [Unit((sample(np.array(PROMPTS[0]), np.array(c.ids), prompt=9),)) for c in out[0]]
        logps_T = engine(model, build_batch(units)).logps_T
        assert logps_T is not None
        logps_T.sum().backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_what_cannot_be_sampled_is_refused_with_numbers():
    sampler = InProcess(tiny("llama"))
    with pytest.raises(UserError, match=r"17 tokens with 250 new ones exceeds the 256"):
        sampler.generate(PROMPTS, 1, Sampling(max_new_tokens=250))
    with pytest.raises(UserError, match="prompt 1 has no tokens"):
        sampler.generate([[3], []], 1, SAMPLING)
    with pytest.raises(UserError, match="tokenizer"):
        sampler.generate([[3]], 1, dataclasses.replace(SAMPLING, stop_strings=("x",)))
    assert sampler.generate([], 2, SAMPLING) == []


def test_one_token_and_released_memory():
    sampler = InProcess(tiny("llama"))
    out = sampler.generate(PROMPTS, 2, dataclasses.replace(SAMPLING, max_new_tokens=1))
    assert [len(completion.ids) for completion in flat(out)] == [1] * 8
    first = sampler.generate(PROMPTS, 2, SAMPLING)
    sampler.close()
    assert flat(sampler.generate(PROMPTS, 2, SAMPLING)) == flat(first)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
def test_graphs_sample_what_the_training_forward_says(adapted: bool, compiled: bool):
    model = tiny("qwen3", head_dim=32, max_position_embeddings=1024).cuda()
    model = with_lora(model).cuda() if adapted else model
    engine = Engine(model)
    sampler = InProcess(model, engine=engine, end_ids=range(3, 5), compile=compiled)
    settings = dataclasses.replace(SAMPLING, max_new_tokens=200)
    out = sampler.generate(PROMPTS, 5, settings)
    sampled = torch.tensor([logp for completion in flat(out) for logp in completion.logps])
    difference = (sampled - trained_logps(engine, model, PROMPTS, out, 0.8)).abs()
    assert difference.max() < 2e-2
    assert difference.mean() < 1e-3
    again = sampler.generate(PROMPTS, 5, settings)
    assert [c.ids for c in flat(again)] == [c.ids for c in flat(out)]


def twice_attending(kind: str):
    """A model that attends with one module more than once in a forward."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0 if weight.ndim > 1 else 1.0)
    return model


@pytest.mark.parametrize("kind", ["diffllama", "hrm_text"])
def test_a_module_that_attends_twice_in_a_forward_keeps_each_calls_tokens(kind: str):
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("this transformers does not have it")
    model = twice_attending(kind)
    engine = Engine(model)
    sampler = InProcess(model, engine=engine, end_ids=())
    greedy = sampler.generate(PROMPTS, 2, Sampling(max_new_tokens=12, temperature=0.0))
    assert sampler.shares_prefixes
    assert largest_difference(engine, model, PROMPTS, greedy, 1.0) < 1e-4
    for prompt, group in zip(PROMPTS, greedy, strict=True):
        given = torch.tensor([prompt])
        expected = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False, eos_token_id=VOCABULARY
        )
        assert [one.ids for one in group] == [expected[0, len(prompt) :].tolist()] * 2


def scaled_by_place():
    """Llama 4 scales queries by their place in the row, here from the fourth token on."""
    return tiny("llama4_text", attn_temperature_tuning=True, floor_scale=4, no_rope_layers=[1, 0, 1])


def dropping_arguments():
    """Nemotron hands no forward arguments on to its layers."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron", **SIZES)).float().eval()


@torch.no_grad()
@pytest.mark.parametrize("make", [scaled_by_place, dropping_arguments])
def test_prompts_are_shared_where_the_models_own_layers_know_nothing_of_it(make):
    sampler = InProcess(make(), end_ids=())
    out = sampler.generate(PROMPTS, 2, SAMPLING)
    assert sampler.shares_prefixes
    untouched = make()
    for prompt, group in zip(PROMPTS, out, strict=True):
        for one in group:
            ids = torch.tensor(prompt + one.ids)
            log_p = (untouched(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
            right = log_p.gather(1, ids[len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(one.logps), right, atol=1e-4, rtol=0)


def test_a_limit_of_positions_below_zero_is_none():
    model = tiny("llama")
    model.config.max_position_embeddings = -1
    assert len(InProcess(model, end_ids=()).generate(PROMPTS, 1, SAMPLING)[2][0].ids) == 12


def test_a_model_that_generate_cannot_cache_is_sampled_without_one(caplog):
    """A tiny xLSTM's cache has another shape than its states."""
    config = AutoConfig.for_model("xlstm", **SIZES, embedding_dim=32, num_blocks=3, num_heads=4, chunk_size=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    engine = Engine(model)
    out = InProcess(model, engine=engine).generate(PROMPTS, 2, SAMPLING)
    assert "sampled by transformers' generate without a cache" in caplog.text
    assert largest_difference(engine, model, PROMPTS, out) < 1e-4


def mlp_weights(model) -> list[torch.nn.Parameter]:
    """The weights of MLPs, without adapters."""
    named = model.named_parameters()
    return [w for name, w in named if ".mlp." in name and w.dim() == 2 and "lora_" not in name]


def rounded(model):
    """A copy of a model whose MLPs have the weights that 8 bits hold."""
    other = copy.deepcopy(model)
    for weight in mlp_weights(other):
        step_F1 = weight.data.abs().amax(1, keepdim=True) / 127
        weight.data = (weight.data / step_F1).round() * step_F1
    return other


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_weights_in_8_bits_are_those_that_tokens_are_drawn_with(kind: str, adapted: bool):
    model = with_lora(tiny(kind)) if adapted else tiny(kind)
    engine = Engine(model)
    sampler = InProcess(model, engine=engine, int8=True)
    for _ in range(2):
        other = rounded(model)
        out = sampler.generate(PROMPTS, 3, SAMPLING)
        assert largest_difference(Engine(other), other, PROMPTS, out) < 1e-4
        assert largest_difference(engine, model, PROMPTS, out) > 1e-3
        for weight in model.parameters():
            weight.requires_grad_(True).grad = weight.detach().roll(1)
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()  # counts no change of a weight
        sampler.sync(1)
    held = sampler.held_bytes()
    sampler.close()
    assert held - sampler.held_bytes() > sum(weight.numel() for weight in mlp_weights(model))
    assert len(sampler.generate(PROMPTS, 1, SAMPLING)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("gemma2", "of the form of Llama, and Gemma2ForCausalLM has others"),
        ("qwen3_moe", "of the form of Llama, and Qwen3MoeForCausalLM has others"),
        ("mamba", "MambaForCausalLM is sampled by transformers' generate"),
    ],
)
def test_other_models_are_not_read_in_8_bits(kind: str, problem: str):
    with pytest.raises(UserError, match=f"trl.sampler_quantization: .*{problem}"):
        InProcess(tiny(kind), int8=True).generate(PROMPTS, 1, SAMPLING)
