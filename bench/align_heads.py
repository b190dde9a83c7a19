"""CPU seconds and peak memory of both heads with gradients: one vocabulary, or two that share three quarters.

`python -m bench.align_heads same` and `python -m bench.align_heads align`, on one CPU thread.
"""

import json
import resource
import sys
import time
from typing import get_args

import torch
from torch import nn

from upweight.engine.divergences import COMPARED, LogitTransform, TeacherStates
from upweight.engine.head import linear_statistics
from upweight.engine.logits import HeadRequest
from upweight.engine.outcomes import Matched
from upweight.methods.distill import Kind
from upweight.types import Divergence

TOKENS, VOCABULARY, SHARED, STUDENT, TEACHER, TRIES = 1024, 32_000, 24_000, 256, 512, 4


def seconds(kind: Kind, *, align: bool) -> float:
    """Return the shortest CPU time of forward and backward of both heads."""
    torch.manual_seed(0)
    hidden, target = torch.randn(TOKENS, STUDENT, requires_grad=True), torch.randint(0, VOCABULARY, (TOKENS,))
    head, other = (nn.Linear(width, VOCABULARY, bias=False) for width in (STUDENT, TEACHER))
    ours, theirs = (torch.randperm(VOCABULARY)[:SHARED] for _ in range(2))
    matched = Matched.of(ours, theirs, (VOCABULARY, VOCABULARY)) if align else None
    teacher = TeacherStates(torch.randn(TOKENS, TEACHER), other, LogitTransform(), VOCABULARY, matched)
    names, how = frozenset({*COMPARED, "entropy_T"}), Divergence(kind, summed=True)
    request = HeadRequest(LogitTransform(), 1.0, names, how, LogitTransform())
    shortest = float("inf")
    for _ in range(TRIES):
        began = time.process_time()
        out = linear_statistics(hidden, head.weight, None, target, request, teacher=teacher)
        out["divergence_T"].sum().backward()
        shortest = min(shortest, time.process_time() - began)
    return shortest


def main() -> None:
    """Print the seconds of each divergence, and the peak of the process in MB."""
    torch.set_num_threads(1)
    found = {kind: round(seconds(kind, align=sys.argv[1:] == ["align"]), 2) for kind in get_args(Kind)}
    print(json.dumps(found | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
