"""What the benchmarks say where they cannot run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEN = "torch.cuda.is_available() is False"


@pytest.mark.parametrize("name", ["gpu_curves", "gpu_kernels"])
def test_a_benchmark_of_a_gpu_refuses_in_one_line_without_one(name):
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    command = [sys.executable, "-m", f"bench.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"python -m bench.{name}: needs a GPU, and torch sees none here ({SEEN})\n"
