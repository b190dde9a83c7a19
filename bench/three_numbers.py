"""SFT, then GRPO by this library and by TRL, on sums of three numbers: held-out accuracy by step and by second.

python -m bench.three_numbers --model FOLDER [--gguf FILE] [--seeds 1 2 3] [--steps 60] [--picture FILE.svg]

The first stage is run once (`examples/three_numbers/sft.yaml`); each seed of the second begins with its weights. Both
libraries run the same script (`bench/peers/grpo_learn.py`), one process after the other, a JSON line each. TRL is run
by this Python, or by the one named in TRL_PYTHON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "three_numbers"
COLOURS = {"upweight": "#c2410c", "trl": "#1d4ed8"}
LEFT, WIDTH, TOP, HEIGHT, APART = 44, 270, 20, 230, 330  # of a panel, and from one panel to the next


def first_stage(asked: argparse.Namespace, folder: Path) -> Path:
    """The model after imitating answers."""
    subprocess.run([sys.executable, str(EXAMPLE / "problems.py")], cwd=folder, check=True)
    out = folder / "sft"
    place = Path(asked.model).resolve() if Path(asked.model).is_dir() else asked.model
    keys = [f"base_model={place}", f"output_dir={out}", f"max_steps={asked.sft_steps}"]
    keys += [f"gguf_file={asked.gguf}"] if asked.gguf else []
    command = [sys.executable, "-m", "upweight", "train", str(EXAMPLE / "sft.yaml"), *keys]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    return out


def second_stage(library: str, seed: int, model: Path, rows: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """One run of the script."""
    python = os.environ.get("TRL_PYTHON", sys.executable) if library == "trl" else sys.executable
    script = ROOT / "bench" / "peers" / "grpo_learn.py"
    options = {"model": model, "rows": rows, "seed": seed, "steps": asked.steps, "every": asked.every,
               "prompts": asked.prompts, "members": asked.members, "rate": asked.rate}  # fmt: skip
    command = [python, str(script), library, *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def panel(runs: list[dict[str, Any]], axis: str, left: float) -> list[str]:
    """Accuracy over steps or seconds: a line for the mean of the seeds and a band from the least to the most."""
    last = max(run["held_out"][-1][axis] for run in runs)
    tenths = ceil(10 * max(point["accuracy"] for run in runs for point in run["held_out"]))
    parts = []
    for tenth in range(tenths + 1):
        y = TOP + HEIGHT * (1 - tenth / tenths)
        parts.append(f'<path d="M{left} {y}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tenth / 10:g}</text>')
    for library, colour in COLOURS.items():
        curves = [run["held_out"] for run in runs if run["library"] == library]
        at = [left + WIDTH * mean(curve[n][axis] for curve in curves) / last for n in range(len(curves[0]))]
        values = [[curve[n]["accuracy"] for curve in curves] for n in range(len(curves[0]))]
        low, high, middle = (
            [f"{x:.1f},{TOP + HEIGHT * (1 - 10 * pick(each) / tenths):.1f}" for x, each in zip(at, values, strict=True)]
            for pick in (min, max, mean)
        )
        parts.append(f'<polygon points="{" ".join([*low, *high[::-1]])}" fill="{colour}" fill-opacity="0.2"/>')
        parts.append(f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    foot = TOP + HEIGHT + 18
    parts.append(f'<text x="{left + WIDTH}" y="{foot}" text-anchor="end">{last:.0f}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{foot}" text-anchor="middle">{axis}</text>')
    return parts


def picture(runs: list[dict[str, Any]]) -> str:
    """Both panels as an SVG picture."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 300" font-family="sans-serif" font-size="13">']
    parts.append('<rect width="660" height="300" fill="white"/>')
    parts += panel(runs, "step", LEFT) + panel(runs, "seconds", LEFT + APART)
    for row, (library, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{LEFT + 10 + 90 * row}" y="292" fill="{colour}">{library}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.three_numbers", description=__doc__)
    parser.add_argument("--model", required=True, help="the model's folder or hub id")
    parser.add_argument("--gguf", help="its weights, where they are in one GGUF file")
    parser.add_argument("--sft-steps", type=int, default=90)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from one measurement to the next")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=COLOURS, action="append")
    parser.add_argument("--keep", type=Path, help="folder for rows and the first stage; what is there is used")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "sft"
        if not (model / "model.safetensors").is_file():
            first_stage(asked, folder)
        for seed in asked.seeds:
            for library in asked.only or COLOURS:
                runs.append(second_stage(library, seed, model, folder, asked))
                print(json.dumps(runs[-1]), flush=True)
    if asked.picture:
        asked.picture.write_text(picture(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
