"""Training steps with images on one GPU against TRL's, one JSON line a case: `python -m bench.gpu_vision`.

Random weights of Qwen2.5-VL-3B's shape in bfloat16, gradient checkpointing, a LoRA of rank 16 on the language model or
all weights trained; four prompts with an image of 1,024 tokens and eight completions of 128 tokens each, or eight pairs
of answers. A whole step samples its completions. Both sides run as processes of their own, step by step in turn, on the
same rows. `--tiny` rehearses it on a CPU with a tiny model; `--peer-python` names the Python that has TRL.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.gpu_step import ROOT, Side, in_turn
from bench.vision_parts import LARGE, TINY, work_of

CASES = ("vlm_grpo_step", "vlm_dpo_step", "vlm_grpo_whole")
PROMPTS = {"vlm_dpo_step": 8}


def measure(case: str, train: str, options: argparse.Namespace) -> dict[str, Any]:
    """Our step and TRL's, by turns, on the same rows."""
    rank, threads = (16 if train == "lora" else 0), (options.threads if options.tiny else 0)
    shape, new = (TINY, 24) if options.tiny else (LARGE, 128)
    work = work_of(case, shape, prompts=PROMPTS.get(case, 4), completion=new, lora_r=rank)
    dtype = "float32" if options.tiny else "bfloat16"
    peers = options.peer or [dtype]
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("ours", *(f"trl_{dtype}" for dtype in peers)):
            folder = Path(temporary) / name
            folder.mkdir()
            (folder / "work.json").write_text(json.dumps(work))
            script = ROOT / "bench" / "peers" / "trl_vision.py"
            command = [sys.executable, "-m", "bench.vision_ours", folder, dtype]
            if name != "ours":
                command = [options.peer_python, script, folder, name.removeprefix("trl_")]
            sides[name] = Side([*command, threads], folder / "log")
        try:
            line = in_turn(sides, options.steps, settle=int(case != "vlm_grpo_whole"))
        finally:
            for side in sides.values():
                side.end()
    ratios = {
        f"ratio_{dtype}": round(line[f"trl_{dtype}_s"] / line["ours_s"], 2)
        for dtype in peers
        if "ours_s" in line and f"trl_{dtype}_s" in line
    }
    return {"name": f"{'tiny' if options.tiny else 'gpu'}_{case}", "train": train} | line | ratios


def on_cpu(case: str, threads: int, repeats: int, peer_python: Path) -> dict[str, Any]:
    """The line of a case with the tiny model and all weights trained, for `python -m bench`."""
    options = argparse.Namespace(tiny=True, threads=threads, steps=repeats, peer=None, peer_python=peer_python)
    line = measure(case, "full", options)
    renamed = {key.replace("trl_float32_", "peer_"): value for key, value in line.items()}
    return renamed | {"name": case, "ratio": renamed.pop("ratio_float32", None), "repeats": repeats, "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_vision", description=__doc__)
    parser.add_argument("--only", choices=CASES, action="append", help="measure these cases")
    parser.add_argument("--train", choices=["lora", "full"], action="append", help="what is trained (default: lora)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peer", choices=["float32", "bfloat16"], action="append", help="TRL's weights")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in float32 on the CPU")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, with --tiny")
    options = parser.parse_args()
    for case in options.only or CASES:
        for train in options.train or ["lora"]:
            print(json.dumps(measure(case, train, options)), flush=True)


if __name__ == "__main__":
    main()
