"""How close training comes to the machine: `python -m bench.gpu_share [1.5b|7b|32k ...]`, one JSON line a case.

Useful work is 6 x weights x distinct tokens (4 x with a LoRA: no gradients of the frozen weights) plus attention, with
nothing for recomputation; it is divided by the rate of a large bfloat16 matrix product in the same process. What an
optimizer would hold is allocated after the first step: AdamW's moments, for `7b` in 8 bits. `32k` is one row of 32,768
tokens through the 7B shape with a LoRA, with all of the GPU's memory beyond 80 GB taken away.
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch

from bench.gpu_ours import runner_of
from bench.gpu_step import SHAPE, VOCABULARY
from upweight.models.memory import optimizer_bytes

SHAPE_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
}
CASES: dict[str, dict[str, Any]] = {  # shape, rows of so many tokens, LoRA rank
    "1.5b": {"shape": SHAPE, "rows": 4, "length": 8192, "lora_r": 0, "optimizer": "adamw_torch"},
    "7b": {"shape": SHAPE_7B, "rows": 2, "length": 8192, "lora_r": 0, "optimizer": "adamw_bnb_8bit"},
    "32k": {"shape": SHAPE_7B, "rows": 1, "length": 32_768, "lora_r": 16, "optimizer": "adamw_torch", "memory": 80e9},
}


def matmul_rate(size: int = 8192, repeats: int = 20) -> float:
    """Operations a second of a bfloat16 matrix product."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        torch.matmul(left, right)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        torch.matmul(left, right)
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - start)


def useful(case: dict[str, Any]) -> float:
    """Operations that one step needs, forward and backward."""
    shape, tokens = case["shape"], case["rows"] * case["length"]
    width, kv = shape["hidden_size"], shape["hidden_size"] * shape["num_key_value_heads"] / shape["num_attention_heads"]
    layer = 2 * width * width + 2 * width * kv + 3 * width * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + width * VOCABULARY
    passes = 4 if case["lora_r"] else 6
    causal = 2 * shape["num_hidden_layers"] * width * case["rows"] * case["length"] ** 2  # half of the square, twice
    return passes * weights * tokens + 3 * causal


def work_of(case: dict[str, Any]) -> dict[str, Any]:
    """Random rows of a case, and its settings."""
    rows = torch.randint(2, VOCABULARY, (case["rows"], case["length"])).tolist()
    return {
        "name": "sft_step",
        "rows": [{"input_ids": row, "loss_mask": [False] + [True] * (len(row) - 1)} for row in rows],
        "budget": case["length"],
        "vocabulary": VOCABULARY,
        **{key: case[key] for key in ("lora_r", "shape", "optimizer")},
    }


def measure(name: str, steps: int = 4) -> dict[str, Any]:
    """Seconds, memory and useful share of one case."""
    case = CASES[name]
    rate = matmul_rate()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    taken = torch.empty(max(0, free - int(case.get("memory", free))), dtype=torch.uint8, device="cuda")
    model, runner, units = runner_of(work_of(case))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    moments = taken[:0]
    seconds = []
    for _ in range(steps):
        model.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.train(model, units)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if not len(moments):
            moments = torch.empty(trained * optimizer_bytes(case["optimizer"]), dtype=torch.uint8, device="cuda")
            torch.cuda.reset_peak_memory_stats()
    took = median(seconds[1:])
    return {
        "name": f"share_{name}",
        "ours_s": round(took, 3),
        "tokens": case["rows"] * case["length"],
        "useful_tflops": round(useful(case) / took / 1e12),
        "matmul_tflops": round(rate / 1e12),
        "share": round(useful(case) / took / rate, 3),
        "peak_gib": round((torch.cuda.max_memory_allocated() - taken.nbytes) / 2**30, 1),
    }


if __name__ == "__main__":
    for wanted in sys.argv[1:] or CASES:
        print(json.dumps(measure(wanted)), flush=True)
