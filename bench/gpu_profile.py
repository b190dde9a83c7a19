"""Where the time of one GPU training step goes: `python -m bench.gpu_profile --only grpo_280 --train full`.

Prints one JSON line a case: seconds without the profiler, seconds that kernels ran by family, what is left as gaps,
how long the host took to hand the step over, how often it waited for the GPU, and the slowest kernels.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_ours import runner_of
from bench.gpu_step import CASES, write_work

FAMILIES = {
    "attention": ("flex_attention", "flash", "fmha", "triton_tem"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "splitk"),
    "fused": ("triton",),
    "embedding": ("embedding", "index", "gather", "scatter", "sort", "radix"),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "reductions": ("reduce",),
    "element-wise": ("elementwise", "multi_tensor"),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def family_of(kernel: str) -> str:
    """What kind of work a kernel does, by its name."""
    name = kernel.lower()
    return next((family for family, words in FAMILIES.items() if any(word in name for word in words)), "other")


def timed(step: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Medians of a step's seconds and of the seconds the host took to hand it over; the peak of memory."""
    wall, host = [], []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"s": median(wall), "host_s": median(host), "peak_gib": round(peak, 1)}


def profiled(step: Callable[[], Any], slowest: int = 12) -> dict[str, Any]:
    """Milliseconds of kernels by family, the slowest kernels with their calls, launches and waits of one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recording:
        step()
        torch.cuda.synchronize()
    families: Counter[str] = Counter()
    kernels: list[tuple[float, int, str]] = []
    launches = waits = 0
    for row in recording.key_averages():
        launches += row.count if row.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")) else 0
        waits += row.count if row.key in WAITS else 0
        if str(row.device_type).endswith("CUDA") and row.self_device_time_total:
            milliseconds = row.self_device_time_total / 1e3
            families[family_of(row.key)] += milliseconds
            kernels.append((round(milliseconds, 2), row.count, row.key[:90]))
    return {
        "families_ms": {family: round(ms, 1) for family, ms in families.most_common()},
        "busy_ms": round(sum(families.values()), 1),
        "launches": launches,
        "waits": waits - 1,  # one is ours
        "slowest": sorted(kernels, reverse=True)[:slowest],
    }


def measured(case: str, lora: bool) -> dict[str, Any]:
    """The whole line of one case."""
    with tempfile.TemporaryDirectory() as folder:
        write_work(case, lora, Path(folder))
        model, runner, units = runner_of(json.loads((Path(folder) / "work.json").read_text()))

    def step() -> None:
        model.zero_grad()
        runner.train(model, units)

    for _ in range(3):
        step()
    return timed(step) | profiled(step)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_profile", description=__doc__)
    parser.add_argument("--only", choices=[case for case in CASES if case != "grpo_whole"], default="grpo_280")
    parser.add_argument("--train", choices=["lora", "full"], default="full")
    options = parser.parse_args()
    line = measured(options.only, options.train == "lora")
    print(json.dumps({"name": f"gpu_{options.only}", "train": options.train} | line))


if __name__ == "__main__":
    main()
