"""Sampling with the lengths of real completions on a GPU: an end is drawn with probability 1 / mean, up to a cap.

python -m bench.gpu_tail [CASE ...]: one JSON line a case, with the seconds of the first call and of further calls with
other prompts, whose largest beside their median shows what is compiled or captured in the midst of a run.
"""

import gc
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.gpu_generate import difference
from bench.gpu_share import SHAPE_7B
from bench.gpu_step import SHAPE, VOCABULARY
from upweight.config.sections.model import AdapterSection
from upweight.engine import Engine
from upweight.models.adapters.attach import attach_adapter
from upweight.models.precision import set_up_precision
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

SHAPE_135M = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {"135m": SHAPE_135M, "1.5b": SHAPE, "7b": SHAPE_7B}


@dataclass(frozen=True)
class Case:
    """A model's shape, prompts and completions of each, the mean and the largest length, and whether with a LoRA."""

    shape: str
    prompts: int
    count: int
    mean: int
    cap: int
    lora: bool = False
    calls: int = 3


CASES = {
    "512": Case("1.5b", 32, 16, 512, 2048),
    "512_lora": Case("1.5b", 32, 16, 512, 2048, lora=True),
    "2048": Case("1.5b", 128, 16, 512, 2048, calls=2),
    "7b": Case("7b", 16, 16, 512, 2048),
    "long": Case("1.5b", 4, 16, 8192, 16384, calls=2),
    "small": Case("135m", 4, 16, 400, 512, calls=8),
}


def policy(case: Case) -> Any:
    """The model as a trainer holds it, of random weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    shape = {**SHAPES[case.shape], "max_position_embeddings": 32768}
    with torch.device("cuda"):
        base = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **shape))
    torch.set_default_dtype(torch.float32)
    if not case.lora:
        return base.requires_grad_(False)
    model = attach_adapter(base, AdapterSection(kind="lora", rank=16, alpha=32, target_linear=True))
    set_up_precision(model, torch.bfloat16)
    return model


def measure(name: str) -> dict[str, Any]:
    """Tokens a second of the second call, and what the calls took."""
    case = CASES[name]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = policy(case)
    engine = Engine(model)
    sampler = InProcess(model, engine=engine, end_ids=range(1000, 1000 + VOCABULARY // case.mean), compile=True)
    seconds, out, prompts = [], [], []
    for call in range(case.calls):
        generator = np.random.default_rng(call)
        prompts = [generator.integers(0, 1000, int(n)).tolist() for n in generator.integers(128, 384, case.prompts)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = sampler.generate(prompts, case.count, Sampling(max_new_tokens=case.cap, seed=call))
        seconds.append(time.perf_counter() - start)
    lengths = [len(completion.ids) for group in out for completion in group]
    return {
        "name": f"tail_{name}", "tokens_s": round(sum(lengths) / seconds[-1]), "first_s": round(seconds[0], 2),
        "rest_s": [round(each, 2) for each in seconds[1:]], "mean": round(float(np.mean(lengths)), 1),
        "difference": round(difference(engine, model, prompts[0], out[0][:2]), 4),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }  # fmt: skip


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        print(json.dumps(measure(chosen)), flush=True)
