"""Measures the cases and prints one JSON line for each: seconds of both sides, their ratio, and how far they agree."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench import gpu_vision, strided
from bench.cases import CASES, Case, write_case

ROOT = Path(__file__).parent.parent
PEER_VENV = ROOT / ".cache" / "bench-peer"
PEER = "trl[peft]==1.16.0"
VISION = ("vlm_grpo_step", "vlm_dpo_step")  # with images


def peer_python() -> Path:
    """The Python of TRL's own environment, which is built when it is missing."""
    python, ready = PEER_VENV / "bin" / "python", PEER_VENV / ".ready"
    if not ready.exists() or ready.read_text() != f"{PEER} pillow":
        print(f"building {PEER_VENV.relative_to(ROOT)} for {PEER}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", PEER_VENV], check=True)
        # torch first and alone: whatever else depends on it then finds the pinned build in place.
        for requirement in ("torch", PEER, "pillow"):
            install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", requirement]
            subprocess.run(install, check=True, stdout=sys.stderr)
        ready.write_text(f"{PEER} pillow")
    return python


class Worker:
    """A process that runs one step each time it is asked."""

    def __init__(self, command: list[str | Path], threads: int, log: Path, root: Path = ROOT) -> None:
        settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        paths = {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=root,
                env=os.environ | settings | paths,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def step(self) -> dict[str, float]:
        """Seconds, loss, gradient norm and peak memory of one more step; of a whole step also its parts."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args} ended without an answer:\n{self.log.read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(case: Case, threads: int, repeats: int) -> dict[str, Any]:
    """Both sides' steps in turn, after one of each to warm up; medians."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_case(case, folder, seed=0)
        sides = {
            "ours": Worker([sys.executable, "-m", "bench.ours", folder, str(threads)], threads, folder / "ours.log"),
            "peer": Worker(
                [peer_python(), ROOT / "bench" / "peers" / "trl_step.py", folder, str(threads)],
                threads,
                folder / "peer.log",
            ),
        }
        try:
            steps = [{name: side.step() for name, side in sides.items()} for _ in range(repeats + 1)][1:]
        finally:
            for side in sides.values():
                side.close()

    def middle(side: str, key: str) -> float:
        return median(step[side][key] for step in steps)

    parts = [key for key in ("rollout_s", "training_s", "tokens") if key in steps[0]["ours"]]

    return {
        "name": case.name,
        "ours_s": round(middle("ours", "wall_s"), 3),
        "peer_s": round(middle("peer", "wall_s"), 3),
        "ratio": round(middle("peer", "wall_s") / middle("ours", "wall_s"), 2),
        "cpu_ratio": round(middle("peer", "cpu_s") / middle("ours", "cpu_s"), 2),
        "ours_loss": middle("ours", "loss"),
        "peer_loss": middle("peer", "loss"),
        "ours_grad_norm": middle("ours", "grad_norm"),
        "peer_grad_norm": middle("peer", "grad_norm"),
        "ours_peak_mb": round(middle("ours", "peak_mb")),
        "peer_peak_mb": round(middle("peer", "peak_mb")),
        **{f"{side}_{key}": round(middle(side, key), 3) for key in parts for side in ("ours", "peer")},
        "peer": PEER,
        "threads": threads,
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [*(case.name for case in CASES), strided.NAME, *VISION]
    parser.add_argument("--only", choices=names, help="measure this case alone")
    parser.add_argument("--threads", type=int, default=1, help="threads of each side (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each side (default: 3)")
    options = parser.parse_args()
    for case in CASES:
        if options.only in (None, case.name):
            print(json.dumps(measure(case, options.threads, options.repeats)), flush=True)
    if options.only in (None, strided.NAME):
        print(json.dumps(strided.measure(options.threads, options.repeats)), flush=True)
    for name in VISION:
        if options.only in (None, name):
            line = gpu_vision.on_cpu(name, options.threads, options.repeats, peer_python())
            print(json.dumps(line | {"peer": PEER}), flush=True)


if __name__ == "__main__":
    main()
