"""Sampling in process on a GPU: random weights of Qwen2.5-1.5B's shape, one JSON line a case.

python -m bench.gpu_generate [CASE ...] [--peer] [--profile]: with transformers' own `generate` on the same model beside
it, and with the kernels of one call.
"""

import argparse
import dataclasses
import gc
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.gpu_profile import profiled
from bench.gpu_step import SHAPE, VOCABULARY
from upweight.config.sections.model import AdapterSection
from upweight.engine import Engine
from upweight.engine.packing import bucketed, build_batch
from upweight.models.adapters.attach import attach_adapter
from upweight.models.precision import set_up_precision
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, Sample, Sampling, Unit

PROMPT, NEW = 256, 256
CASES = {  # prompts, completions of each, LoRA, torch.compile
    "64": (4, 16, False, False),
    "256": (16, 16, False, False),
    "64_lora": (4, 16, True, False),
    "32_lora": (4, 8, True, False),
    "256_lora": (16, 16, True, False),
    "64_compiled": (4, 16, False, True),
    "256_compiled": (16, 16, False, True),
    "32_lora_compiled": (4, 8, True, True),
    "64_lora_compiled": (4, 16, True, True),
    "256_lora_compiled": (16, 16, True, True),
}


def policy(lora: bool) -> torch.nn.Module:
    """The model as a trainer holds it: bfloat16, float32 masters of what is trained."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        base = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **SHAPE))
    torch.set_default_dtype(torch.float32)
    if not lora:
        return base.requires_grad_(False)
    model = attach_adapter(base, AdapterSection(kind="lora", rank=16, alpha=32, target_linear=True))
    set_up_precision(model, torch.bfloat16)
    return model


def difference(engine: Engine, model: Any, prompt: list[int], group: list[Completion]) -> float:
    """Mean distance of one group's log-probs from the training forward's."""
    units = [
        Unit((Sample(np.array(prompt + c.ids), np.arange(len(prompt) + len(c.ids)) >= len(prompt)),)) for c in group
    ]
    with torch.no_grad():
        logps_T = engine(model, build_batch(units, pad_to=bucketed).to("cuda")).logps_T
    assert logps_T is not None
    return float((logps_T.cpu() - torch.tensor([x for c in group for x in c.logps])).abs().mean())


def measure(name: str, models: dict[bool, tuple[Any, Engine]], profile: bool) -> dict[str, Any]:
    """Speed, memory and agreement of one case, and its kernels if asked for."""
    prompts, count, lora, compiled = CASES[name]
    if lora not in models:
        models.clear()
        gc.collect()
        torch.cuda.empty_cache()
        model = policy(lora)
        models[lora] = model, Engine(model)
    model, engine = models[lora]
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (prompts, PROMPT)).tolist()
    sampler = InProcess(model, engine=engine, end_ids=(), compile=compiled)
    sampling = Sampling(max_new_tokens=NEW, seed=0)
    torch.cuda.reset_peak_memory_stats()

    def seconds(sampling: Sampling) -> tuple[float, list[list[Completion]]]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = sampler.generate(drawn, count, sampling)
        return time.perf_counter() - start, out

    first, _ = seconds(sampling)
    total, out = min((seconds(sampling) for _ in range(3)), key=lambda found: found[0])
    prefill = min(seconds(dataclasses.replace(sampling, max_new_tokens=1))[0] for _ in range(2))
    memory = torch.cuda.max_memory_allocated() / 2**30
    kernels = profiled(lambda: sampler.generate(drawn, count, sampling)) if profile else {}
    sampler.close()
    return {
        "name": name,
        "tokens_s": round(prompts * count * NEW / total),
        "total_s": round(total, 3),
        "ms_step": round((total - prefill) / (NEW - 1) * 1e3, 2),
        "prefill_s": round(prefill, 3),
        "capture_s": round(first - total, 2),
        "difference": round(difference(engine, model, drawn[0], out[0]), 4),
        "gib": round(memory, 1),
        **kernels,
    }


def plain_generate(name: str, models: dict[bool, tuple[Any, Engine]]) -> float:
    """Tokens a second of transformers' `generate`, every completion with its prompt, on the same model."""
    prompts, count, lora, _ = CASES[name]
    model, _ = models[lora]
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (prompts, PROMPT))
    ids = torch.tensor(drawn, device="cuda").repeat_interleave(count, 0)
    seconds = 0.0
    with torch.no_grad():
        for new in (4, NEW):  # the first warms up
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    return prompts * count * NEW / seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_generate", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    kept: dict[bool, tuple[Any, Engine]] = {}
    for case in options.cases or CASES:
        line = measure(case, kept, options.profile)
        if options.peer:
            theirs = plain_generate(case, kept)
            line |= {"generate_tokens_s": round(theirs), "ratio": round(line["tokens_s"] / theirs, 2)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
