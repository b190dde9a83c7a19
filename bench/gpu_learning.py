"""Learning curves of an example, ours and the peer's at equal steps: one JSON line each.

python -m bench.gpu_learning arithmetic|gsm8k --folder MODEL_FOLDER --gguf FILE --rows FILE [--steps N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "arithmetic": {"rewards": ("correct", "close"), "new": 16, "batch": 64},
    "gsm8k": {"rewards": ("tags", "layout", "correct"), "new": 192, "batch": 64},
}


def ours(name: str, case: dict[str, Any], asked: argparse.Namespace) -> dict[str, Any]:
    """Rewards by step of `upweight train` on the example's config, with the case's sizes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"base_model={asked.folder}", f"gguf_file={asked.gguf}", f"datasets.0.path={asked.rows}",
            f"max_steps={asked.steps}", f"micro_batch_size={case['batch']}", "gradient_accumulation_steps=1",
            f"trl.max_completion_length={case['new']}", f"learning_rate={asked.rate}", "lr_scheduler=constant",
            "warmup_steps=0", "logging_steps=1", "save_strategy=no", f"output_dir={folder}/out", "adapter=null",
            f"dataset_prepared_path={folder}/prepared", "gradient_checkpointing=false", "max_grad_norm=1.0",
            "trl.log_completions=false", "evals_per_epoch=null", "eval_strategy=steps", f"eval_steps={asked.steps}",
            "eval_on_start=true",
            *([] if name == "arithmetic" else ["datasets.0.name=null", "val_set_size=64"]),
        ]  # fmt: skip
        began = time.perf_counter()
        command = [sys.executable, "-m", "upweight", "train", str(ROOT / "examples" / name / "config.yaml"), *settings]
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    return {
        "ours": name,
        "reward": [round(line["reward"], 3) for line in steps],
        "rewards": {key: [round(line[f"rewards/{key}/mean"], 3) for line in steps[:: max(len(steps) // 20, 1)]]
                    for key in case["rewards"]},
        "rollout_seconds": round(sum(line["rollout/seconds"] for line in steps), 1),
        "total_seconds": round(time.perf_counter() - began, 1),
        "held_out": [line for line in lines if any(key.startswith("eval_") for key in line)],
    }  # fmt: skip


def peer(name: str, case: dict[str, Any], asked: argparse.Namespace) -> None:
    """The peer's line, printed by itself."""
    options = {"folder": asked.folder, "gguf": asked.gguf, "rows": asked.rows, "steps": asked.peer_steps,
               "tasks": ROOT / "examples" / name / "tasks.py", "rewards": ",".join(case["rewards"]),
               "new": case["new"], "batch": case["batch"], "rate": asked.rate, "seed": asked.peer_seed}  # fmt: skip
    script = ROOT / "bench" / "peers" / "trl_grpo_learn.py"
    subprocess.run([sys.executable, script, *(f"--{key}={value}" for key, value in options.items())], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_learning", description=__doc__)
    parser.add_argument("case", choices=CASES)
    for name in ("folder", "gguf", "rows"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=150, help="0: the peer alone")
    parser.add_argument("--peer-steps", type=int, default=0)
    parser.add_argument("--peer-seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e-5)
    asked = parser.parse_args()
    asked.rows = str(Path(asked.rows).resolve())
    if asked.steps:
        print(json.dumps(ours(asked.case, CASES[asked.case], asked)), flush=True)
    if asked.peer_steps:
        peer(asked.case, CASES[asked.case], asked)


main()
