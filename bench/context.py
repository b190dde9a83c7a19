"""Memory of a rank when ranks share a row: `python -m bench.context --ranks 1 2 4 --tokens 2048`.

A forward and a backward of one row of a random Qwen2 (6 layers, width 256, 32,000 tokens of vocabulary, 8 heads, 4 key
heads), float32, on CPU ranks or, where there are as many, on GPUs. Prints one JSON line for each number of ranks: MiB
that the forward saves for the backward (weights left out) and the largest rise of memory over both, of the worst rank.
"""

import argparse
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.spawn import spawn
from transformers import Qwen2Config, Qwen2ForCausalLM

from upweight.engine import Engine
from upweight.engine.packing import build_batch
from upweight.train.distributed.ranks import context_parallel_group
from upweight.types import Sample, Unit

MIB = 2**20


def measure(engine: Engine, model: Qwen2ForCausalLM, tokens: int, device: torch.device) -> dict[str, float]:
    """MiB saved by a forward of one row, and the most that forward and backward add to this process."""
    ids = torch.randint(3, 32_000, (tokens,), generator=torch.Generator().manual_seed(0))
    batch = build_batch([Unit((Sample(ids=ids.numpy(), loss_mask=(torch.arange(tokens) > 0).numpy()),))]).to(device)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    before = peak(device)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        logps_T = engine(model, batch).logps_T
    assert logps_T is not None
    logps_T.mean().backward()
    kept = sum(size for place, size in saved.items() if place not in weights)
    return {"saved_mib": kept / MIB, "peak_rise_mib": (peak(device) - before) / MIB}


def peak(device: torch.device) -> float:
    """The most bytes that this process has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_rank(rank: int, world: int, tokens: int, folder: str) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()})
    on_gpu = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    place = f"file://{folder}/store{world}"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=place, rank=rank, world_size=world)
    PartialState(cpu=not on_gpu)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32_000}
    model = Qwen2ForCausalLM(Qwen2Config(max_position_embeddings=1 << 20, **shape))
    torch.nn.Module.to(model, device)
    engine = Engine(model, context=context_parallel_group(world))
    measure(engine, model, 64 * world, device)  # gradients and buffers are there from now on
    found = measure(engine, model, tokens, device)
    Path(f"{folder}/{world}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for world in asked.ranks:
            spawn(run_rank, args=(world, asked.tokens, folder), nprocs=world)
            found = [json.loads(Path(f"{folder}/{world}-{rank}.json").read_text()) for rank in range(world)]
            worst = {name: round(max(one[name] for one in found), 1) for name in found[0]}
            print(json.dumps({"ranks": world, "tokens": asked.tokens, **worst}), flush=True)


if __name__ == "__main__":
    main()
