"""What a plan says of weights, training and kept activations, beside the bytes of a tiny model that trains.

On the CPU with the forms that layers have on a GPU: a fused kernel keeps what it reads, and attention its output.
"""

from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from upweight.config.load import parse_config
from upweight.engine.attention.interface import Tree
from upweight.methods import SFT
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels import rotary
from upweight.models.kernels.fused_layers import is_gated_mlp, is_rms_norm
from upweight.models.load import load_model
from upweight.models.memory import Savings, estimate, shape_of
from upweight.train.policy import make_policy
from upweight.train.step import StepRunner
from upweight.types import Sample, Unit

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}


class _Kernel(torch.autograd.Function):
    """A function as one kernel, which keeps its inputs, and its output where its backward reads it."""

    @staticmethod
    def forward(ctx: Any, function, reads_output, *tensors):
        out = function(*tensors)
        ctx.function = function
        ctx.save_for_backward(*tensors, *([out] if reads_output else []))
        ctx.inputs = len(tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_() for one in ctx.saved_tensors[: ctx.inputs]]
            return None, None, *torch.autograd.grad(ctx.function(*inputs), inputs, grad_outputs[0], allow_unused=True)


def as_on_a_gpu(model, monkeypatch):
    def attend(self, module, query, key, value, params):  # noqa: PLR0917
        causal = lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)  # noqa: E731
        return _Kernel.apply(causal, True, query, key, value)

    def norm(self, x):
        return _Kernel.apply(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-6), False, x, self.weight)

    def gated(self, x):
        product = _Kernel.apply(lambda gate, up: F.silu(gate) * up, False, self.gate_proj(x), self.up_proj(x))
        return self.down_proj(product)

    monkeypatch.setattr(Tree, "attend", attend)
    monkeypatch.setattr(modeling_qwen2, rotary.NAME, rotary.fused_form(modeling_qwen2.apply_rotary_pos_emb))
    for module in model.modules():
        form = norm if is_rms_norm(module) else gated if is_gated_mlp(module) else None
        if form is not None and "forward" not in vars(module):  # a block with adapters is one node already
            module.forward = MethodType(form, module)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    config = Qwen2Config(vocab_size=64, num_hidden_layers=4, tie_word_embeddings=True, **SIZES)
    config.architectures = ["Qwen2ForCausalLM"]
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def trained(folder, kind, mode):
    """A model with its step runner and optimizer, and the config's savings without those that need a device."""
    content = {"base_model": str(folder), "memory": mode, "optimizer": "adamw_torch", "activation_offloading": False}
    content |= {"adapter": "lora", "lora_r": 2, "lora_target_linear": True} if kind == "lora" else {}
    config = parse_config(content, folder=folder, fragment=True)
    torch.manual_seed(0)
    model: Any = load_model(config.model, BF16, head="tokens", tokenizer=None, adapter=config.adapter, seed=0)
    if kind == "lora":
        model = attach_adapter(model, config.adapter)
    here = torch.device("cpu")
    policy = make_policy(model.train(), SFT(), BF16, here, longest=512, optim=config.optim, section=config.model)
    runner = StepRunner(SFT(), policy.engine, Accelerator(cpu=True), 1 << 20, None, BF16)
    runner.row_check.checked = (1 << 30, 1 << 30)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    return config, model, runner, optimizer, policy.copies


def predicted(config, kind, tokens, savings):
    options = {"optimizer": "adamw_torch", "reference": False, "tokens": tokens, "savings": savings}
    return estimate(shape_of(config.model, "tokens"), kind, config.adapter, **options)


def text(length):
    ids = np.random.default_rng(length).integers(2, 60, length)
    return [Unit((Sample(ids, np.ones(length, np.bool_)),))]


def size_of(tensors):
    stored = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(stored.values())


@pytest.mark.parametrize("kind", ["lora", "all"])
def test_weights_gradients_and_optimizer(kind, folder):
    config, model, runner, optimizer, copies = trained(folder, kind, "balanced")
    runner.train(model, text(16))
    optimizer.step()
    weights = [weight for weight in model.parameters() if not weight.requires_grad]
    masters = [weight for weight in model.parameters() if weight.requires_grad]
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    training = [*masters, *(weight.grad for weight in masters), *states]
    need = predicted(config, kind, 16, Savings())
    shape = shape_of(config.model, "tokens")
    if kind == "all":  # forwards read the copies; while gradients are summed, the largest exists more than once
        assert size_of(copies._copies) == pytest.approx(need.weights, rel=0.01)
        assert size_of(training) == pytest.approx(need.training - 3 * 4 * shape.largest, rel=0.01)
    else:
        assert size_of(weights) == pytest.approx(need.weights, rel=0.01)
        assert size_of([*training, *copies._copies]) == pytest.approx(need.training, rel=0.01)


@pytest.mark.parametrize("length", [96, 256])
@pytest.mark.parametrize("kind", ["lora", "all"])
@pytest.mark.parametrize("mode", ["lean", "balanced", "fast"])
def test_kept_activations(mode, kind, length, folder, monkeypatch):
    config, model, runner, _, copies = trained(folder, kind, mode)
    as_on_a_gpu(model, monkeypatch)
    fixed = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *copies._copies)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in fixed and len(tensor) > 0:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows = runner.packer.rows(text(length), 1 << 20)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        runner.engine(model, rows[0].batch)
    kept_all = mode in ("balanced", "fast")  # where there is room, `fast` recomputes nothing
    shape = shape_of(config.model, "tokens")
    token = (shape.with_block_nodes() if kind == "lora" else shape).token
    right = length * token.saved(Savings(recompute=not kept_all))
    beside = length * SIZES["hidden_size"] * 2 * 2  # what the last norm and the head keep
    assert size_of(saved.values()) - beside == pytest.approx(right, rel=0.1)
