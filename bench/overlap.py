"""Does sampling hide behind training? A real vLLM server on one core, the trainer on another, ahead and not.

`make test-vllm` builds the environment that the server runs in. With `--gpu` both share one GPU, the model has
Qwen2.5-1.5B's shape, and vLLM is the one of this Python, found under VLLM_PYTHONPATH. Prints one JSON line.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from bench.cases import Case, write_case
from bench.gpu_step import SHAPE

ROOT = Path(__file__).parent.parent
VLLM_PYTHON = ROOT / ".cache" / "vllm-env" / "bin" / "python"
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ON_GPU = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1"}
SIZES = {"cpu": {"completions": 32, "prompt": 64, "new": 48}, "gpu": {"completions": 256, "prompt": 1024, "new": 48}}
WARM_UP = 2  # steps that are not counted
STARTING = 600  # seconds
REWARD = """
def even(completion_ids, **kwargs):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def write_config(folder: Path, args: argparse.Namespace) -> Path:
    """A GRPO run with an adapter on the bench's random model."""

    def prompts(rng: random.Random) -> list[dict[str, Any]]:
        return [{"prompt": [rng.randrange(2, 32_000) for _ in range(args.prompt)]} for _ in range(64)]

    case = Case("overlap", prompts, micro_batch=1, budget=1)
    write_case(case, folder, seed=0)
    if args.gpu:
        _write_large(folder / "model")
    (folder / "tokenizer").mkdir()  # beside the model it would be taken for one of the model's own kind
    for file in (folder / "model").glob("*token*"):
        file.rename(folder / "tokenizer" / file.name)
    rows = json.loads((folder / "work.json").read_text())["rows"]
    texts = [{"prompt": " ".join(f"t{token}" for token in row["prompt"])} for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (folder / "overlap_rewards.py").write_text(REWARD)
    content = {
        "base_model": str(folder / "model"), "tokenizer_config": str(folder / "tokenizer"),
        "rl": "grpo", "datasets": [{"path": str(folder / "prompts.jsonl")}],
        "adapter": "lora", "lora_r": 8, "lora_target_linear": True, "learning_rate": 1e-4,
        "micro_batch_size": args.completions, "max_steps": args.steps + WARM_UP, "logging_steps": 1,
        "save_strategy": "no", "bf16": args.gpu, "dataset_prepared_path": str(folder / "prepared"),
        "trl": {"use_vllm": True, "vllm_server_port": args.port, "vllm_server_timeout": 600, "num_generations": 8,
                "max_completion_length": args.new, "reward_funcs": ["overlap_rewards.even"]},
        "vllm": {"port": args.port, "dtype": "bfloat16" if args.gpu else "float32", "enforce_eager": True,
                 "gpu_memory_utilization": 0.3,
                 "max_model_len": args.prompt + args.new},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def _write_large(folder: Path) -> None:
    """Random weights of the GPU benches' shape in the place of the small ones."""
    import torch
    from torch import nn
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(folder)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id, "bos_token_id": None}
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=config.vocab_size, **ends, **SHAPE))
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)


def pinned(command: list[str], core: int | None, log: Path, **env: str) -> subprocess.Popen[bytes]:
    """A command, on one core alone where one is given; its output goes to a file."""
    with log.open("w") as out:
        return subprocess.Popen(
            [*([] if core is None else ["taskset", "-c", str(core)]), *command],
            env=os.environ | SETTINGS | env,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def say(what: str) -> None:
    """Progress, for whoever waits for the line."""
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


def steps_of(config: Path, name: str, core: int | None, *options: str) -> list[dict[str, float]]:
    """What each step of a run logs, with the seconds between its log and the one before as `step_s`."""
    out, log = config.parent / name, config.parent / f"{name}.log"
    command = [sys.executable, "-m", "upweight", "train", str(config), f"output_dir={out}", *options]
    run, seen, last = pinned(command, core, log), [], time.perf_counter()
    while True:
        ended = run.poll() is not None
        file = out / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        lines = [line for line in lines if "rollout/seconds" in line]
        now = time.perf_counter()
        if len(lines) > len(seen):
            seen += [line | {"step_s": (now - last) / (len(lines) - len(seen))} for line in lines[len(seen) :]]
            last = now
        if ended:
            break
        time.sleep(0.005)
    say(f"{name}: {len(seen)} steps")
    if run.returncode:
        sys.exit(f"the run ended with {run.returncode}:\n{log.read_text()[-3000:]}")
    return seen[WARM_UP:]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both runs against one server; medians over their steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config, log = write_config(folder, args), folder / "server.log"
        python = sys.executable if args.gpu else str(VLLM_PYTHON)
        serve = [sys.executable, "-m", "upweight", "vllm-serve", str(config), "--python", python]
        found = {"PYTHONPATH": f"{SETTINGS['PYTHONPATH']}:{os.environ.get('VLLM_PYTHONPATH', '')}"} | ON_GPU
        server = pinned(serve, args.cores[0], log, **(found if args.gpu else ON_CPU))
        try:
            stop = time.monotonic() + STARTING
            while "vLLM is ready" not in log.read_text():
                if server.poll() is not None or time.monotonic() > stop:
                    sys.exit(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            say("the server is ready")
            plain = steps_of(config, "plain", args.cores[1])
            ahead = steps_of(config, "ahead", args.cores[1], "trl.async_prefetch=true")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)

    def middle(steps: list[dict[str, float]], key: str) -> float:
        return median(step[key] for step in steps)

    generation = middle(plain, "rollout/seconds")
    training = median(step["step_s"] - step["rollout/wait_seconds"] for step in plain)
    longer = max(generation, training)
    return {
        "name": "overlap",
        "generation_s": round(generation, 3),
        "training_s": round(training, 3),
        "sync_s": round(middle(plain, "rollout/sync_seconds"), 3),
        "plain_step_s": round(middle(plain, "step_s"), 3),
        "ahead_step_s": round(middle(ahead, "step_s"), 3),
        "over_longer": round(middle(ahead, "step_s") / longer, 3),
        "over_sum": round(middle(ahead, "step_s") / (generation + training), 3),
        "trainer_idle": round(middle(ahead, "rollout/trainer_idle"), 3),
        "sampler_idle": round(middle(ahead, "rollout/sampler_idle"), 3),
        "lag": max(step["rollout/lag"] for step in ahead),
        "steps": len(ahead),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--completions", type=int, help="of a step, in groups of 8")
    parser.add_argument("--prompt", type=int, help="tokens")
    parser.add_argument("--new", type=int, help="tokens of a completion")
    parser.add_argument("--port", type=int, default=18765)
    parser.add_argument("--cores", type=int, nargs=2, default=(0, 1), help="of the server, and of the trainer")
    parser.add_argument("--gpu", action="store_true", help="both on one GPU, and on any core")
    args = parser.parse_args()
    for name, size in SIZES["gpu" if args.gpu else "cpu"].items():
        setattr(args, name, getattr(args, name) or size)
    if args.gpu:
        args.cores = (None, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
