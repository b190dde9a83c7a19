"""Compares this checkout with another one, such as a release: operations, losses and seconds of the same steps.

`git worktree add ../before v1.0 && python -m bench.versions ../before` prints one JSON line for each case. `operations`
are the torch operations that one step dispatches in each checkout, `other_operations` those with another count, and
`other_products` how many of these are matrix products or attention, which cost most of the time: what differs there
does not depend on how busy the machine is. Seconds are of CPU time, of steps taken in turn by both in one run.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.__main__ import ROOT, Worker
from bench.cases import CASES, Case, write_case

COUNT = "--count"  # the first argument of a process that counts
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "attention")


class Operations(TorchDispatchMode):
    """Counts operations by name and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [list(one.shape) for one in args if isinstance(one, torch.Tensor)]
        self.counts[f"{func.overloadpacket.__name__} {shapes}"] += 1
        return func(*args, **(kwargs or {}))


def count(folder: Path) -> None:
    """Print the operations of a case's second step, with the code of the checkout on the path."""
    from bench.ours import TrainingPart

    torch.set_num_threads(1)
    side = TrainingPart(folder, json.loads((folder / "work.json").read_text()))
    side.step()
    side.model.zero_grad()
    with Operations() as operations:
        side.step()
    sys.stdin.readline()
    print(json.dumps(operations.counts), flush=True)


def counted(folder: Path, root: Path) -> Counter[str]:
    """The operations of a case's step in a checkout."""
    worker = Worker([sys.executable, Path(__file__), COUNT, folder], 1, folder / "count.log", root)
    counts = Counter(worker.step())
    worker.close()
    return counts


def compare(case: Case, before: Path, repeats: int) -> dict[str, Any]:
    """Operations, losses and seconds of a case in both checkouts."""
    roots = {"before": before, "now": ROOT}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_case(case, folder, seed=0)
        operations: dict[str, Any] = {}
        if not case.new_tokens:
            counts = {name: counted(folder, root) for name, root in roots.items()}
            other = (counts["before"] - counts["now"]) + (counts["now"] - counts["before"])
            operations["operations"] = {name: each.total() for name, each in counts.items()}
            operations["other_operations"] = other.total()
            products = [name for name in other if any(kind in name.split()[0] for kind in PRODUCTS)]
            operations["other_products"] = sum(other[name] for name in products)
        workers = {
            name: Worker([sys.executable, "-m", "bench.ours", folder, "1"], 1, folder / f"{name}.log", root)
            for name, root in roots.items()
        }
        # Who is first alternates, since the second of two finds other caches.
        rounds = [[*workers.items()][:: 1 if number % 2 else -1] for number in range(repeats + 1)]
        steps = [{name: worker.step() for name, worker in each} for each in rounds]
        for worker in workers.values():
            worker.close()
    same = all(step["before"][key] == step["now"][key] for step in steps for key in ("loss", "grad_norm"))
    seconds = {name: [step[name]["cpu_s"] for step in steps[1:]] for name in roots}
    return {
        "name": case.name,
        **operations,
        "same_losses_and_gradient_norms": same,
        "cpu_s": {name: [round(median(each), 3), round(min(each), 3)] for name, each in seconds.items()},
        "ratio_of_medians": round(median(seconds["now"]) / median(seconds["before"]), 3),
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__)
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="compare this case alone")
    parser.add_argument("--repeats", type=int, default=8, help="measured steps of each side (default: 8)")
    options = parser.parse_args()
    for case in CASES:
        if options.only in (None, case.name):
            print(json.dumps(compare(case, options.before.resolve(), options.repeats)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [COUNT]:
        count(Path(sys.argv[2]))
    else:
        main()
