"""Our training step against TRL's, on the same tokens, on this machine: `python -m bench`."""

import sys

# What runs without a GPU: rehearsals, and processes that a benchmark has started.
ON_A_CPU = {"--tiny", "--tokens", "--here", "--inside", "--side", "--help", "-h"}
WORKERS = ("bench.gpu_ours",)


def _refuse_without_gpu(command: list[str]) -> None:
    """End `python -m bench.gpu_...` where torch sees no GPU; before they import Triton."""
    name = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    if not name.startswith("bench.gpu_") or name in WORKERS or ON_A_CPU & set(command):
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"python -m {name}: needs a GPU, and torch sees none here (torch.cuda.is_available() is False)")


_refuse_without_gpu(sys.orig_argv)
