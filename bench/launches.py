"""Operator calls of a training step with a LoRA, which the host hands to a GPU one by one: `python -m bench.launches`.

A model of 24 narrow layers in bfloat16 on the CPU, with the forms that layers have on a GPU: a kernel that is compiled
or fused there (norm, gate, attention, the statistics of the head) counts once each way. Prints one JSON line a method:
calls that start a kernel by part of the step, views, tensors copied to the device, and calls that would wait for it;
with `--lines`, operators and the source lines that call them.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.models.qwen2 import modeling_qwen2

from bench.ours import grpo_units
from upweight.config.sections.model import AdapterSection, ModelSection
from upweight.config.sections.training import OptimSection
from upweight.data.units import units_of
from upweight.engine import head
from upweight.engine.attention.interface import Tree
from upweight.methods import DPO, GRPO, SFT
from upweight.methods.base import Method
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels import fused_layers, lora_linear, rotary
from upweight.models.kernels.fused_layers import is_gated_mlp, is_rms_norm
from upweight.train.policy import make_policy
from upweight.train.step import StepRunner
from upweight.types import Batch

ROOT = Path(__file__).parent.parent
METHODS: dict[str, Method] = {"dpo": DPO(), "grpo": GRPO(beta=0.04), "sft": SFT()}
VOCABULARY = 128
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
NO_KERNEL = ("detach", "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "promote_types")
READS = ("tolist", "numpy", "cpu")  # of a tensor, by which the host waits for its values
# Rows are built in host memory, from numbers that were never on a device.
ON_HOST = ("engine/packing.py", "engine/images.py", "data/units.py", "engine/attention/interface.py")


class Calls(TorchDispatchMode):
    """Counts operators by name and by the source line that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.paused = "", False
        self.kernels: Counter[tuple[str, str, str]] = Counter()  # part, operator, line
        self.waits: Counter[tuple[str, str]] = Counter()
        self.views = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: Any) -> None:
        """Count one call."""
        name, line = func.overloadpacket.__name__, calling_line()
        if line.startswith(ON_HOST):
            return
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or by_mask:
            self.waits[name, line] += 1
        if func.is_view or name in NO_KERNEL:
            self.views += 1
        else:
            self.kernels[self.part, name, line] += 1

    def opaque(self, name: str) -> None:
        """Count a kernel that is one call on a GPU, and nothing of what stands for it here."""
        if not self.paused:
            self.kernels[self.part, name, "a kernel of a GPU"] += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


def calling_line() -> str:
    """The innermost line of the project, or the operation whose backward runs."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/upweight/" in file:
            line = f"{file.partition('/upweight/')[2]}:{frame.f_lineno}"
            node = torch._C._current_autograd_node()
            return f"backward of {node.name()}" if node is not None and "step.py" in line else line
        frame = frame.f_back
    return "elsewhere"


class _Kernel(torch.autograd.Function):
    """A function as one kernel each way."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        calls.opaque(name)
        ctx.calls, ctx.kernel, ctx.function = calls, name, function
        ctx.save_for_backward(*tensors)
        with calls.pause():
            return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        ctx.calls.opaque(f"{ctx.kernel}_backward")
        with ctx.calls.pause(), torch.enable_grad():
            inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in ctx.saved_tensors]
            out = ctx.function(*inputs)
            return None, None, None, *torch.autograd.grad(out, inputs, grad_outputs[0], allow_unused=True)


@contextmanager
def as_on_a_gpu(calls: Calls, model: Any) -> Iterator[None]:
    """Give the model's layers the forms that they have on a GPU."""

    def attend(self: Tree, module: Any, query: Tensor, key: Tensor, value: Tensor, params: Any) -> Tensor:  # noqa: PLR0917
        options = {"is_causal": True, "scale": params.scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        causal = lambda *tensors: F.scaled_dot_product_attention(*tensors, **options)  # noqa: E731
        return _Kernel.apply(calls, "attention", causal, query, key, value)

    def norm(self: Any, x: Tensor) -> Tensor:
        one = lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, self.variance_epsilon)  # noqa: E731
        return _Kernel.apply(calls, "rms_norm", one, x, self.weight)

    def gated(self: Any, x: Tensor) -> Tensor:
        product = lambda gate, up: F.silu(gate) * up  # noqa: E731
        return self.down_proj(_Kernel.apply(calls, "silu_product", product, self.gate_proj(x), self.up_proj(x)))

    def compiled(function: Callable[..., Any], *_: bool) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            calls.opaque(function.__name__)
            with calls.pause():
                return function(*args, **kwargs)

        return kernel

    for module in model.modules():
        form = norm if is_rms_norm(module) else gated if is_gated_mlp(module) else None
        if form is not None and "forward" not in vars(module):  # a block with adapters is one node already
            module.forward = MethodType(form, module)
    rotated = rotary.fused_form(modeling_qwen2.apply_rotary_pos_emb)
    with (
        patch.object(Tree, "attend", attend),
        patch.object(head, "_maybe_compiled", compiled),
        patch.object(fused_layers, "_silu_product", compiled(fused_layers._silu_product)),
        patch.object(lora_linear, "silu_product", compiled(lora_linear.silu_product)),
        patch.object(lora_linear, "gated_gradients", compiled(lora_linear.gated_gradients)),
        patch.object(modeling_qwen2, rotary.NAME, rotated),
        _reads(calls),
    ):
        yield


@contextmanager
def _reads(calls: Calls) -> Iterator[None]:
    """Count reads of a tensor's values that no operator shows on a CPU, and tensors that a row copies to its device."""
    stock = {name: getattr(Tensor, name) for name in READS}
    moved = Batch.to

    def counted(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            line = calling_line()
            if not calls.paused and line != "elsewhere" and not line.startswith(ON_HOST):
                calls.waits[name, line] += 1
            return stock[name](self, *args, **kwargs)

        return read

    def to(self: Batch, device: Any) -> Batch:
        calls.copied += 0 if calls.paused else sum(torch.is_tensor(value) for value in vars(self).values())
        return moved(self, device)

    with patch.object(Batch, "to", to):
        for name in READS:
            setattr(Tensor, name, counted(name))
        try:
            yield
        finally:
            for name in READS:
                setattr(Tensor, name, stock[name])


def step_of(name: str, layers: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Callable[..., Any]]:
    """A model, and a whole step of a method on it: gradients, clipping, optimizer, metrics."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    base: Any = AutoModelForCausalLM.from_config(
        Qwen2Config(vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=True, **shape)
    )
    adapter = AdapterSection(kind="lora", rank=16, alpha=32, target_linear=True)
    model: Any = attach_adapter(base.to(dtype), adapter)
    model.train()
    method = METHODS[name]
    policy = make_policy(
        model, method, dtype, torch.device("cpu"), longest=256, optim=OptimSection(), section=ModelSection()
    )
    parts = (policy.engine, Accelerator(cpu=True), policy.token_budget, policy.reference, dtype)
    runner = StepRunner(method, *parts)
    runner.row_check.checked = (1 << 30, 1 << 30)  # attention is not that of trees here
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if policy.copies is not None:
        policy.copies.follow(optimizer)
    units = _units(method)

    def step(part: Callable[[str], None] = lambda name: None) -> float:
        model.zero_grad()
        part("gradients")
        loss = runner.train(model, units)
        part("optimizer")
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        part("log")
        return loss.item() + 0 * len(runner.meters.drain(runner.accelerator))

    return model, step


def _units(method: Method) -> list[Any]:
    """Four pairs, two groups of four completions, or four texts: short ones, since only calls are counted."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(count)]

    if method.online:
        rows = [
            {"prompt": words(6), "completions": [words(5) for _ in range(4)], "rewards": [0.0, 0.2, 0.7, 1.0]}
            for _ in range(2)
        ]
        return grpo_units(rows, method)
    if method.name == "sft":
        texts = [words(rng.randint(6, 12)) for _ in range(4)]
        return units_of([{"input_ids": ids, "labels": ids} for ids in texts], method)
    pairs = [{"prompt_ids": words(6), "chosen_ids": words(6), "rejected_ids": words(5)} for _ in range(4)]
    return units_of(pairs, method)


def counted(name: str, layers: int, lines: int) -> dict[str, Any]:
    """What one step of a method calls, after two that set everything up."""
    model, step = step_of(name, layers)
    calls = Calls()
    with as_on_a_gpu(calls, model):
        with calls.pause():
            for _ in range(2):
                step()
        with calls:
            step(lambda part: setattr(calls, "part", part))
    parts: Counter[str] = Counter()
    for (part, _, _), count in calls.kernels.items():
        parts[part] += count
    waits = {f"{operator} {line}": count for (operator, line), count in calls.waits.items()}
    line = {"name": name, "layers": layers, "kernels": sum(parts.values()), **parts, "views": calls.views}
    line |= {"copied_to_device": calls.copied, "waits": waits}
    if lines:
        most = Counter({f"{part} {operator} {at}": n for (part, operator, at), n in calls.kernels.items()})
        line["lines"] = dict(most.most_common(lines))
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__)
    parser.add_argument("--only", choices=list(METHODS), action="append", help="count these methods")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--lines", type=int, default=0, metavar="N", help="the N operators and lines called most often")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # whose products in bfloat16 fail, slowly, on many CPUs before others run
    for name in options.only or METHODS:
        print(json.dumps(counted(name, options.layers, options.lines), indent=1 if options.lines else None), flush=True)


if __name__ == "__main__":
    main()
