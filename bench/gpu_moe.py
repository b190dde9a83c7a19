"""A mixture of experts on one GPU against TRL and vLLM, one JSON line a case: `python -m bench.gpu_moe [CASE ...]`.

Random weights of Qwen3-30B-A3B's shape with fewer layers in bfloat16. Training steps with gradient checkpointing and
the model's load-balancing loss on both sides, of all weights or of a LoRA of rank 16 on attention and on all experts;
sampling with an end that is drawn with probability 1 / 512, up to 2,048 tokens. Each case is a process with a time
limit, whose lines are printed as they come. `--tiny` rehearses the cases on a CPU, where no number means anything.
`--profile` prints instead where one step of ours, or one call of 128 tokens, spends its time: milliseconds and calls.

vLLM is run by the Python named in VLLM_PYTHON, with VLLM_PYTHONPATH as its PYTHONPATH.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_step import VOCABULARY, groups, measure
from bench.gpu_step import work_of as step_work

ROOT = Path(__file__).parent.parent
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
}
TINY = SHAPE | {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TRAINING = {f"{case}_{what}": (case, what) for case in ("grpo_280", "grpo_2048") for what in ("lora", "full")}
SAMPLING = {"sample_64": (4, 16, 512, 2048), "sample_256": (16, 16, 512, 2048)}  # prompts, completions, mean, cap
TINY_SAMPLING = (2, 2, 8, 16)
VLLM = "vllm"  # all cases of sampling, in one process of vLLM
PROFILED = 128  # tokens of each completion in a profiled call
CASES = [*TRAINING, *SAMPLING, VLLM]


def work_of(options: argparse.Namespace) -> dict[str, Any]:
    """What differs from the dense cases, for both sides."""
    work = {
        "model_type": "qwen3_moe",
        "shape": (TINY if options.tiny else SHAPE) | {"num_hidden_layers": options.layers},
        "lora_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    if options.tiny:
        rows = groups(random.Random(0), 7, 5)[:2]
        small = [[[token % 90 + 2 for token in ids] for ids in row["completions"]] for row in rows]
        rows = [
            row | {"prompt": [token % 90 + 2 for token in row["prompt"]], "completions": completions}
            for row, completions in zip(rows, small, strict=True)
        ]
        work |= {"device": "cpu", "vocabulary": 100, "rows": rows}
    return work


def train(name: str, options: argparse.Namespace) -> None:
    """Print the line of a training case."""
    case, what = TRAINING[name]
    # Gradients of many gigabytes: in the first steps the memory that a side gave back is allocated anew.
    for line in measure(case, [what], options.steps, options.peer or ["bfloat16"], settle=3, **work_of(options)):
        print(json.dumps(line | {"name": f"gpu_moe_{case}", "layers": options.layers}), flush=True)


def profile_training(name: str, options: argparse.Namespace) -> None:
    """Print where a step of ours spends its time."""
    from bench.gpu_ours import runner_of
    from bench.gpu_profile import profiled, timed

    case, what = TRAINING[name]
    model, runner, units = runner_of(step_work(case, what == "lora") | work_of(options))

    def step() -> None:
        model.zero_grad()
        runner.train(model, units)

    for _ in range(3):
        step()
    line = {"name": f"gpu_moe_{case}", "train": what} | ({} if options.tiny else timed(step))
    print(json.dumps(line | profiled(step, options.slowest)), flush=True)


def sampling_of(name: str, options: argparse.Namespace) -> tuple[Any, Any, Any, Callable[[int, int], Any]]:
    """Model, engine, prompts, and a call of our sampler, which takes a seed and the most tokens of a completion."""
    import numpy as np

    from bench.gpu_ours import random_base
    from upweight.engine import Engine
    from upweight.sampler.in_process import InProcess
    from upweight.types import Sampling

    prompts, count, mean, _ = TINY_SAMPLING if options.tiny else SAMPLING[name]
    work: dict[str, Any] = {"vocabulary": VOCABULARY} | work_of(options)
    vocabulary, first = work["vocabulary"], 50 if options.tiny else 1000
    model = random_base(work).requires_grad_(False)
    engine = Engine(model)
    ends = range(first, first + vocabulary // mean)
    sampler = InProcess(model, engine=engine, end_ids=ends, compile=not options.tiny)
    drawn = np.random.default_rng(0).integers(0, first, (prompts, 9 if options.tiny else 256)).tolist()

    def call(seed: int, cap: int) -> Any:
        return sampler.generate(drawn, count, Sampling(max_new_tokens=cap, seed=seed))

    return model, engine, drawn, call


def profile_sampling(name: str, options: argparse.Namespace) -> None:
    """Print where a call of our sampler spends its time, once everything is compiled and recorded."""
    from bench.gpu_profile import profiled

    *_, call = sampling_of(name, options)
    cap = min(PROFILED, (TINY_SAMPLING if options.tiny else SAMPLING[name])[3])
    for _ in range(2):
        call(0, cap)
    start = time.perf_counter()
    call(0, cap)
    line = {"name": f"gpu_moe_{name}", "tokens_each": cap, "s": round(time.perf_counter() - start, 3)}
    print(json.dumps(line | profiled(lambda: call(0, cap), options.slowest)), flush=True)


def sample(name: str, options: argparse.Namespace) -> None:
    """Print the line of our sampling: tokens a second of the faster of two calls after the first."""
    import torch

    from bench.gpu_generate import difference

    model, engine, drawn, generate = sampling_of(name, options)
    cap = (TINY_SAMPLING if options.tiny else SAMPLING[name])[3]
    seconds, speeds, out = [], [], []
    for call in range(3):
        start = time.perf_counter()
        out = generate(call, cap)
        seconds.append(time.perf_counter() - start)
        speeds.append(sum(len(completion.ids) for group in out for completion in group) / seconds[-1])
    line = {"name": f"gpu_moe_{name}", "layers": options.layers, "tokens_s": round(max(speeds[1:]))}
    line |= {"first_s": round(seconds[0], 2), "rest_s": [round(each, 2) for each in seconds[1:]]}
    if torch.cuda.is_available():
        line |= {
            "difference": round(difference(engine, model, drawn[0], out[0][:2]), 4),
            "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }
    print(json.dumps(line), flush=True)


def sample_with_vllm(options: argparse.Namespace) -> None:
    """Print vLLM's lines for all cases of sampling, or why there are none."""
    if "VLLM_PYTHON" not in os.environ:
        print(json.dumps({"name": "gpu_moe_vllm", "error": "VLLM_PYTHON is not set: nothing to compare with"}))
        return
    from transformers import AutoConfig

    work: dict[str, Any] = {"vocabulary": VOCABULARY} | work_of(options)
    chosen = {name: TINY_SAMPLING if options.tiny else case for name, case in SAMPLING.items()}
    prompt = (9, 9) if options.tiny else (256, 256)
    names = {",".join(map(str, (*case, *prompt, 2))): name for name, case in chosen.items()}

    def answer(line: dict[str, Any]) -> None:
        name = f"gpu_moe_vllm_{names.get(line.pop('case'), 'all')}"
        print(json.dumps({"name": name, "layers": options.layers} | line), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        shape = work["shape"] | {"architectures": ["Qwen3MoeForCausalLM"]}
        AutoConfig.for_model(work["model_type"], vocab_size=work["vocabulary"], **shape).save_pretrained(folder)
        command = [os.environ["VLLM_PYTHON"], ROOT / "bench" / "peers" / "vllm_tail.py", folder, *names]
        paths = os.environ | {"PYTHONPATH": os.environ.get("VLLM_PYTHONPATH", "")}
        log = Path(folder) / "log"
        with log.open("w") as errors, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=paths
        ) as peer:  # fmt: skip
            printed = [answer(json.loads(text)) for text in peer.stdout or () if text.startswith('{"case"')]
        if not printed:
            answer({"case": "all", "error": log.read_text()[-2000:]})


def run(name: str, limit: float, arguments: list[str]) -> None:
    """Run a case as a process of its own, and print its lines; after so many seconds end all that it started."""
    command = [sys.executable, "-m", "bench.gpu_moe", name, "--here", *arguments]
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "HF_HUB_OFFLINE": "1"}
    log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115 - read after the process
    with log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=env, start_new_session=True
    ) as case:  # fmt: skip
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(case.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        printed = False
        for text in case.stdout or ():
            if text.startswith("{"):
                printed = True
                print(text, end="", flush=True)
        case.wait()
        timer.cancel()
    if late.is_set() or not printed:
        why = f"it took more than {limit:.0f} s" if late.is_set() else Path(log.name).read_text()[-2000:]
        print(json.dumps({"name": f"gpu_moe_{name}", "error": why}), flush=True)
    Path(log.name).unlink()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_moe", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="for each case")
    parser.add_argument("--peer", choices=["float32", "bfloat16"], action="append", help="TRL's weights")
    parser.add_argument("--tiny", action="store_true", help="rehearse on a CPU")
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes, and nothing of a peer")
    parser.add_argument("--slowest", type=int, default=25, metavar="N", help="kernels and operators of a profile")
    parser.add_argument("--here", action="store_true", help="run one case in this process")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case '{unknown[0]}'; there are {', '.join(CASES)}")
    for name in options.cases or CASES:
        if options.profile and name == VLLM:
            continue
        if not options.here:
            run(name, options.limit, [argument for argument in sys.argv[1:] if argument not in CASES])
        elif name in TRAINING:
            (profile_training if options.profile else train)(name, options)
        elif name in SAMPLING:
            (profile_sampling if options.profile else sample)(name, options)
        else:
            sample_with_vllm(options)


if __name__ == "__main__":
    main()
