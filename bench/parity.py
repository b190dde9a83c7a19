"""The same script run with TRL and with Upweight: one JSON line a case, and TRL's numbers recorded for the tests.

python -m bench.parity [--case NAME ...] [--record] [--images]
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.__main__ import PEER, ROOT, peer_python

SCRIPTS = {False: ROOT / "tests" / "parity_script.py", True: ROOT / "tests" / "vision_parity_script.py"}  # by --images
RECORDS = {
    images: ROOT / "tests" / "parity" / f"trl_1_16{'_images' if images else ''}.json" for images in (False, True)
}
NUMBERS = ("loss", "grad_norm")


def steps(library: str, python: str | Path, script: Path, cases: list[str]) -> Iterator[dict[str, Any]]:
    """What the script prints for each case with one of the libraries."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    process = subprocess.Popen(
        [python, script, library, *cases],
        env=os.environ | settings | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if library == "trl" else None,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"case"'):  # trainers print their logs too
            yield json.loads(line)
    if process.wait():
        sys.exit(f"{library} failed; to see why: {python} {script} {library}")


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference between two runs, relative where numbers are above 1."""
    pairs = [pair for name in NUMBERS for pair in zip(ours[name], theirs[name], strict=True)]
    return max(abs(own - other) / max(1.0, abs(other)) for own, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="run this case alone; may be given several times")
    parser.add_argument("--record", action="store_true", help="write TRL's numbers to a file beside the tests")
    parser.add_argument("--images", action="store_true", help="the cases with images")
    options = parser.parse_args()
    script, record = SCRIPTS[options.images], RECORDS[options.images]
    recorded: dict[str, Any] = json.loads(record.read_text()) if options.case else {}
    sides = [("trl", peer_python()), ("upweight", sys.executable)]
    runs = zip(*(steps(library, python, script, options.case) for library, python in sides), strict=True)
    for theirs, ours in runs:
        name = theirs.pop("case")
        recorded[name] = {key: [round(value, 7) for value in theirs[key]] for key in NUMBERS}
        shown = {"case": name, "difference": float(f"{difference(ours, theirs):.2g}"), "peer": PEER}
        print(
            json.dumps(
                shown | {f"ours_{key}": ours[key] for key in NUMBERS} | {f"peer_{key}": theirs[key] for key in NUMBERS}
            ),
            flush=True,
        )
    if options.record:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(steps)}" for name, steps in recorded.items())
        record.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
