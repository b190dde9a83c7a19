"""Where the time of one GPU training step goes: `python -m bench.gpu_profile --only grpo_280 --train full`.

Prints one JSON line a case: seconds without the profiler, seconds that kernels ran by family, what is left as gaps,
how long the host took to hand the step over, how often it waited for the GPU, the slowest kernels, and how many graphs
were compiled after three steps.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import gpu_share, gpu_step
from bench.gpu_ours import runner_of, wait_for_gpu, whole_step_of

SHARES = {f"share_{name}": gpu_share.CASES[name] for name in ("1.5b", "7b")}
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
    """Milliseconds of kernels by family, the slowest kernels and operators with their calls, launches and waits of one
    step. Without a GPU, what the operators took on the CPU."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as recording:
        step()
        wait_for_gpu()
    families: Counter[str] = Counter()
    kernels: list[tuple[float, int, str]] = []
    operators: list[tuple[float, int, str]] = []
    launches = waits = 0
    for row in recording.key_averages(group_by_input_shape=True):
        launches += row.count if row.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")) else 0
        waits += row.count if row.key in WAITS else 0
        milliseconds = (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e3
        if not milliseconds:
            continue
        is_kernel = str(row.device_type).endswith("CUDA")
        if is_kernel or not on_gpu:
            families[family_of(row.key)] += milliseconds
        shapes = " ".join(f"[{', '.join(map(str, shape))}]" for shape in row.input_shapes or () if shape)
        name = row.key[:90] if is_kernel else f"{row.key[:60]} {shapes[:90]}"
        (kernels if is_kernel else operators).append((round(milliseconds, 2), row.count, name))
    return {
        "families_ms": {family: round(ms, 1) for family, ms in families.most_common()},
        "busy_ms": round(sum(families.values()), 1),
        "launches": launches,
        "waits": waits - on_gpu,  # one is ours
        "slowest": sorted(kernels, reverse=True)[:slowest],
        "operators": sorted(operators, reverse=True)[:slowest],
    }


def step_of(case: str, lora: bool, folder: Path) -> Callable[[], Any]:
    """A step of a case as its row of the table takes it, from empty gradients."""
    work = gpu_share.work_of(SHARES[case]) if case in SHARES else gpu_step.work_of(case, lora)
    if case == "grpo_whole":
        model, _, sample, train = whole_step_of(work, folder)
    else:
        model, runner, units = runner_of(work)
        sample, train = (lambda: units), partial(runner.train, model)

    def fresh() -> None:
        model.zero_grad()
        train(sample())

    return fresh


def compiled() -> int:
    """How many graphs were compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_profile", description=__doc__)
    parser.add_argument("--only", choices=[*gpu_step.CASES, *SHARES], default="grpo_280")
    parser.add_argument("--train", choices=["lora", "full"], default="full", help="of the cases that are no share_")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        step = step_of(options.only, options.train == "lora", Path(folder))
        for _ in range(3):
            step()
        before = compiled()
        line = timed(step) | profiled(step) | {"compiled": compiled() - before}
    print(json.dumps({"name": options.only, "train": "full" if options.only in SHARES else options.train} | line))


if __name__ == "__main__":
    main()
