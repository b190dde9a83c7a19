"""What sampling with weights in 8 bits does to learning: the demo's run with and without, one JSON line a seed.

python -m bench.int8_learning [--seeds N] [--only plain | int8] [--set KEY=VALUE ...], after `make demo`, which fetches
SmolLM2-135M-Instruct.
`gap` is the mean distance between the log-probs of sampler and trainer, `largest_weight` the largest importance weight.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = ".cache/demo/SmolLM2-135M-Instruct"
VARIANTS = {"plain": "null", "int8": "int8"}


def run(quantization: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Rewards by step of one run, and before and after on held-out prompts."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            f"base_model={ROOT / MODEL}", f"trl.sampler_quantization={quantization}", f"seed={seed}",
            f"output_dir={folder}/out", f"dataset_prepared_path={folder}/prepared", *settings,
        ]  # fmt: skip
        config = ROOT / "examples" / "demo" / "config.yaml"
        subprocess.run(
            [sys.executable, "-m", "upweight", "train", str(config), *keys], check=True, cwd=ROOT, stdout=sys.stderr
        )
        lines = [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]
    steps, held_out = ([line for line in lines if name in line] for name in ("reward", "eval_reward"))
    trained = [line for line in steps if "sampling/logp_gap" in line]  # no step trains on groups of equal rewards
    weights = [line["sampling/importance_sampling_ratio/max"] for line in trained if quantization != "null"]
    return {
        "rewards": [round(line["reward"], 3) for line in steps],
        "held_out": [round(line["eval_reward"], 3) for line in held_out],
        "gap": round(sum(line["sampling/logp_gap"] for line in trained) / len(trained), 5),
        "largest_weight": round(max(weights), 3) if weights else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.int8_learning", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=VARIANTS)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the config")
    asked = parser.parse_args()
    for seed in range(1, asked.seeds + 1):
        for name in [asked.only] if asked.only else VARIANTS:
            quantization = VARIANTS[name]
            print(json.dumps({"name": name, "seed": seed} | run(quantization, seed, asked.set)), flush=True)


if __name__ == "__main__":
    main()
