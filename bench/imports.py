"""Seconds of CPU time that imports take: torch and transformers, what a trainer of ours adds, and `upweight validate`.

python -m bench.imports
"""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "tests" / "config" / "samples" / "grpo_async.yaml"
IN_ONE_PROCESS = """
import time
start = time.process_time()
import torch
from transformers import Trainer
base = time.process_time()
from upweight import GRPOTrainer
print(base - start, time.process_time() - base)
"""


def main() -> None:
    """Print the three times, each of a second start, when compiled files are there."""
    script = [sys.executable, "-c", IN_ONE_PROCESS]
    subprocess.run(script, check=True, capture_output=True)
    base, added = subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()
    print(f"{float(base):6.2f} s  import torch; from transformers import Trainer")
    print(f"{float(added):6.2f} s  more for: from upweight import GRPOTrainer")
    validate = [sys.executable, "-m", "upweight", "validate", str(CONFIG)]
    subprocess.run(validate, check=True, capture_output=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(validate, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:6.2f} s  upweight validate {CONFIG.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
