"""Where the time of an online step goes on 8 to 4,096 GPUs: `python -m bench.scaling`.

Arithmetic, no measurement: seconds of each part of a step from sizes and from the figures below, for the split of GPUs
into trainers and servers that is fastest. docs/scaling.md says where the figures come from and what the table teaches.
`--measure` measures the two figures of rank 0 on this machine instead of taking those below.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass, replace

SIZES = {  # parameters, layers, bytes of a token's keys and values (2 x layers x key heads x width x 2 bytes)
    "1.5b": (1.54e9, 28, 28_672),
    "8b": (8.0e9, 32, 131_072),
    "32b": (32.8e9, 64, 262_144),
    "70b": (70.6e9, 80, 327_680),
}


@dataclass(frozen=True)
class Figures:
    """What hardware and programs do; see docs/scaling.md for each."""

    train_flops: float = 344e12  # useful operations of a GPU a second in training: measured, H200
    sample_flops: float = 344e12  # the same while sampling: fits the measured slope
    sample_overhead: float = 2.7e-3  # seconds of a sampling step beside arithmetic and memory: measured
    memory: float = 141e9  # bytes of a GPU
    memory_rate: float = 4.8e12  # bytes a second from its memory: data sheet
    network: float = 50e9  # bytes a second and GPU between machines: one 400 Gbit/s card each
    nvlink: float = 450e9  # bytes a second, GPU and direction within a machine
    latency: float = 10e-6  # of a collective, for each doubling of its ranks
    storage: float = 40e9  # bytes a second of the shared file system, for all readers together
    write: float = 5e9  # bytes a second of one writer to it
    parse: float = 0.64e-6  # seconds of rank 0 to read one sampled token from a server's answer: measured
    hand_over: float = 0.1e-6  # seconds to pack or unpack a token of the rollout: measured
    token_bytes: float = 16  # of a packed token: id, log-prob, version
    hosts: float = 5e9  # bytes a second that one machine's CPU sends to another's, in a tree of all ranks
    plan: float = 20e-6  # seconds of every rank to plan and fold one sequence: measured
    straggle: float = 1.3  # longest completion over the mean one, where rollouts run ahead


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    parameters: float
    layers: int
    kv_bytes: float
    trained: float  # share of the weights that travels in a sync and in gradients
    prompt: int
    completion: int
    group: int
    per_gpu: float  # completions of a step for each GPU
    sharing: int  # context_parallel_size
    reward_s: float  # seconds of CPU for a completion
    workers: int  # reward_workers, on rank 0's machine
    ahead: bool  # sampling while training
    sync_interval: int


def smallest_server(run: Run, figures: Figures) -> int:
    """GPUs of one server: weights in half of their memory, the rest for keys and values."""
    return 2 ** max(0, math.ceil(math.log2(2 * run.parameters / (0.5 * figures.memory))))


def training(run: Run, f: Figures, completions: float, ranks: int) -> tuple[float, float]:
    """Seconds of arithmetic, and of traffic that does not hide behind it, of one optimizer step under FSDP2."""
    tokens = completions * run.completion + completions / run.group * run.prompt
    operations = (6 if run.trained == 1 else 4) * run.parameters * tokens
    compute = operations / ranks / f.train_flops
    rows = max(1, round(tokens / ranks / 16_384))
    link = f.nvlink if ranks <= 8 else f.network
    # Weights are gathered in half precision for forward and backward, gradients reduced in float32, after each row.
    traffic = rows * (2 * 2 * run.parameters + 4 * run.parameters * run.trained) / link
    waits = rows * 3 * run.layers * f.latency * math.log2(max(ranks, 2))
    if run.sharing > 1:  # queries, keys, values, outputs; forward, recomputed, backward; within a machine
        width = math.sqrt(run.parameters / run.layers / 12)
        traffic += 3 * run.layers * 2 * 4 * width * tokens / ranks / f.nvlink
    return compute, max(0.0, traffic + waits - 0.9 * compute)


def sampling(run: Run, f: Figures, completions: float, gpus: int, size: int) -> float:
    """Seconds until a step's completions are written by servers of `size` GPUs each."""
    servers = gpus // size
    room = (0.9 * f.memory * size - 2 * run.parameters) / (run.kv_bytes * (run.prompt / run.group + run.completion))
    at_once = max(1.0, min(completions / servers, room, 1024 * size))
    keys = at_once * run.kv_bytes * (run.prompt / run.group + run.completion / 2)
    memory = (2 * run.parameters + keys) / (size * f.memory_rate)
    step = f.sample_overhead * run.layers / 28 + memory + 2 * run.parameters * at_once / (size * f.sample_flops)
    return completions / servers / at_once * run.completion * step * f.straggle


def parts(run: Run, f: Figures, gpus: int, trainers: int, size: int) -> dict[str, float]:
    """Seconds of each part of a step."""
    completions = run.per_gpu * gpus
    tokens = completions * (run.completion + run.prompt / run.group)
    compute, traffic = training(run, f, completions, trainers)
    sent = 2 * run.parameters * run.trained
    servers = (gpus - trainers) // size
    sync = sent / f.write + max(sent / (8 * f.network), servers * sent / f.storage)
    return {
        "train": compute,
        "traffic": traffic,
        "plan": completions * f.plan,
        "hand over": tokens * (2 * f.hand_over + f.token_bytes / f.hosts * math.log2(max(trainers, 2))),
        "sample": sampling(run, f, completions, gpus - trainers, size),
        "parse": completions * run.completion * f.parse,
        "rewards": completions * run.reward_s / run.workers,
        "sync": sync / run.sync_interval,
    }


def step_seconds(part: dict[str, float], ahead: bool) -> float:
    """Seconds of a step: trainers and the sampling side one after the other, or at the same time."""
    train = part["train"] + part["traffic"] + part["plan"] + part["hand over"]
    sample = max(part["sample"], part["parse"], part["rewards"])  # they overlap where rollouts stream
    return (max(train, sample) if ahead else train + sample) + part["sync"]


def best(run: Run, f: Figures, gpus: int) -> tuple[float, int, dict[str, float]]:
    """The fastest split: seconds of a step, trainers, seconds of its parts."""
    size = smallest_server(run, f)
    unit = max(8 if gpus > 16 else 1, size, run.sharing)
    need = run.parameters * (18 if run.trained == 1 else 2.2) / (0.7 * f.memory)  # shards of weights and their states
    tried = [n for n in range(unit, gpus - size + 1, unit) if n >= need]
    if not tried:
        raise SystemExit(f"{gpus} GPUs do not hold shards and a server")
    found = [(step_seconds(p := parts(run, f, gpus, n, size), run.ahead), n, p) for n in tried]
    return min(found, key=lambda one: one[0])


def measured() -> dict[str, float]:
    """Seconds of this machine for a token: to read it from a server's answer, and to hand it over."""
    from upweight.rollout.rollout import Rollout
    from upweight.train.online.broadcast import from_flat, to_flat
    from upweight.types import Completion, Group

    count = 100_000
    logps, ids = [-1.0 / (n % 97 + 1) for n in range(count)], [n % 150_000 for n in range(count)]
    answer = json.dumps({"token_ids": ids, "logprobs": {"token_logprobs": logps, "tokens": [f"t{n}" for n in ids]}})
    began = time.process_time()
    json.loads(answer)
    parse = time.process_time() - began
    rollout = Rollout(0, 0, [Group(0, {}, [], [Completion(ids, logps, [1] * count, finished=True)])])
    began = time.process_time()
    from_flat(*to_flat(rollout))
    return {"parse": parse / count, "hand_over": (time.process_time() - began) / 2 / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64, 256, 1024, 4096])
    parser.add_argument("--lora", action="store_true", help="train 0.5%% of the weights and send only those")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=int, default=2048)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--per-gpu", type=float, default=16, help="completions of a step for each GPU")
    parser.add_argument("--batch", type=int, help="completions of a step, whatever the number of GPUs")
    parser.add_argument("--context", type=int, default=1, help="context_parallel_size")
    parser.add_argument("--reward-seconds", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--in-turn", action="store_true", help="no async_prefetch: sample, then train")
    parser.add_argument("--sync-interval", type=int, default=1)
    parser.add_argument("--measure", action="store_true")
    a = parser.parse_args()
    shape = (*SIZES[a.model], 0.005 if a.lora else 1.0, a.prompt, a.completion, a.group, a.per_gpu, a.context)
    run = Run(*shape, a.reward_seconds, a.workers, not a.in_turn, a.sync_interval)
    figures = replace(Figures(), **measured()) if a.measure else Figures()
    names, first = None, 0.0
    for gpus in a.gpus:
        at = replace(run, per_gpu=a.batch / gpus) if a.batch else run
        seconds, trainers, part = best(at, figures, gpus)
        rate = at.per_gpu * gpus * at.completion / seconds / gpus
        first = first or rate
        if names is None:
            names = list(part)
            print(
                " ".join(f"{name:>9}" for name in ["GPUs", "trainers", *names, "step s", "tok/s/GPU", "share", "most"])
            )
        cells = [f"{part[name]:.2f}" for name in names]
        ends = [f"{seconds:.1f}", f"{rate:.0f}", f"{rate / first:.2f}", max(part, key=part.__getitem__)]
        print(" ".join(f"{cell:>9}" for cell in [str(gpus), str(trainers), *cells, *ends]))


if __name__ == "__main__":
    main()
