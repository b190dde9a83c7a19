"""Where our step of `bench.gpu_distill` goes: seconds of parts, and the slowest kernels of sampling and training."""

import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.gpu_distill import Device, OurSide
from upweight.engine import head
from upweight.engine.activations import recompute_every_layer
from upweight.models.modules import unwrap_peft
from upweight.train.distill.teachers import LocalTeacher
from upweight.train.step import StepRunner

# The head's forward is a part of the student's; what backward recomputes is in backward.
PARTS = {
    "teacher": (LocalTeacher, "_taught"),
    "student_forward": (StepRunner, "_row_outputs"),
    "head_forward": (head, "linear_statistics"),
}


@contextlib.contextmanager
def clocked(device: Device, accelerator: Any) -> Iterator[dict[str, float]]:
    """Inside, the seconds of each part of a step add up; the device is waited for around each."""
    spent: dict[str, float] = defaultdict(float)

    def clock(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = device.seconds()
            result = inner(*args, **kwargs)
            spent[name] += device.seconds() - began
            return result

        return timed

    with contextlib.ExitStack() as stack:
        for name, (place, attribute) in (PARTS | {"backward": (accelerator, "backward")}).items():
            stack.enter_context(patch.object(place, attribute, clock(name, getattr(place, attribute))))
        yield spent


def report(work: dict[str, Any], warm: int = 2) -> Iterator[dict[str, Any]]:
    """Yield a step's parts and peak of memory, the same without kept activations, kernels of sampling and training."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "work.json").write_text(json.dumps(work))
        side = OurSide(folder)
        for _ in range(warm):
            side.step()
        whole = side.step()
        side.sample()
        side.device.start()
        before = side.device.allocated_gib()
        with clocked(side.device, side.trainer.accelerator) as spent:
            side.train()
        yield {"part": "step", **whole, "before_training_gib": before} | {f"{name}_s": s for name, s in spent.items()}
        if side.device.cuda is not None:
            from bench.gpu_profile import profiled

            side.model.zero_grad()
            yield {"part": "sampling", **profiled(side.sample, 10)}
            yield {"part": "training", **profiled(side.train, 25)}
        recompute_every_layer(unwrap_peft(side.model))
        side.step()
        yield {"part": "every layer recomputed", **side.step()}
