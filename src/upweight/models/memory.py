"""Memory of training: what a device has, what each part may take of it, and what a model's shape needs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import psutil
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel, set_zero3_state

from upweight.config import Config
from upweight.config.sections.model import LOGGED, SELF, AdapterSection, ModelSection, TeacherSection
from upweight.config.sections.training import LESS_MEMORY, OptimSection
from upweight.config.servers import is_url
from upweight.models.adapters.attach import linear_names
from upweight.models.first_look import Stored
from upweight.models.kernels.experts.grouped import WEIGHTS
from upweight.models.kernels.tiled_mlp import TILE, is_gated_block
from upweight.models.load import Head, config_with_head, model_without_weights, named_by, teacher_source
from upweight.models.modules import GATED_PROJECTIONS

GIB = 2**30
DRIVER_BYTES = 3 * GIB // 4  # of a GPU, for its driver and the workspaces of libraries
# Lost to fragmentation: holes between weights, and a part of what they leave to activations.
HOLES, USABLE_SHARE = 0.015, 0.92
HALF_BYTES, SINGLE_BYTES = 2, 4
USUAL_OPTIMIZER = "adamw"  # two moments in float32
TrainedWeights = Literal["all", "lora", "qlora"]
QUANTISED_BYTES = {"load_in_4bit": 0.53, "load_in_8bit": 1.02}  # bytes of a weight with its share of the scales
SCALES = 0.03  # bytes of them for a weight that is stored in so many bits, as the usual group of 128 has them
HEAD_CHUNK = 2**27 * 2 * HALF_BYTES  # projections of one chunk and their gradients: logits are never built as a whole
# Of the memory that is free once the weights are loaded: the activations of one forward, which fix its tokens; keys and
# values of sampling in this process, at each rollout; activations that need not be recomputed, at the first step.
FORWARD_SHARE, SAMPLER_SHARE, KEPT_SHARE = 0.5, 0.5, 0.5
FUSED_ACTIVATIONS = ("silu", "swish")  # of models whose norms and gated blocks run as fused kernels on a GPU
LAYERS_IN_FLIGHT = 2  # inputs of layers that are on the device while the others are in host memory
MIN_TOKEN_BUDGET = 256  # below which a row is not cut when a step ran out of memory


@dataclass(frozen=True)
class Savings:
    """What a run does to need less memory, at the cost of time."""

    recompute: bool = False  # every layer's activations, in the backward
    offload_activations: bool = False  # what is saved for the backward is in host memory
    offload_reference: bool = False  # so are the reference and teachers, while they are not used
    head_chunk: int | None = None  # scored tokens whose logits exist at a time; None: as many as HEAD_CHUNK holds
    tiled_above: int | None = None  # tokens of a row whose gated blocks are not computed in tiles; None: of any row

    @classmethod
    def of(cls, config: Config) -> "Savings":
        """Return those that a config asks for."""
        return cls.by(config.optim)

    @classmethod
    def by(cls, optim: OptimSection) -> "Savings":
        """Return those of a config's section."""
        # With `keep` a layer is recomputed where its activations do not fit, so they need not.
        offload = optim.activation_offloading, optim.reference_offloading
        tiled_above = max(optim.token_budget or TILE, TILE) if optim.tiled_mlp else None
        return cls(optim.gradient_checkpointing, *offload, optim.head_chunk, tiled_above)


@dataclass(frozen=True)
class TokenBytes:
    """What one token takes in half precision, by what holds it."""

    layers: int
    layer: int  # at the peak of one layer's backward: what it kept, what it recomputes, and their gradients
    kept: int  # of that, what one layer keeps from its forward to its backward
    gate: int  # what it keeps beside that if its gated block is not fused, because its weights are quantised in 8 bits
    block: int  # of `layer`, what a gated block takes, which `tiled_mlp` computes a tile at a time
    inputs: int  # of one layer
    keys: int  # keys and values of all layers, in sampling
    product: int = 0  # of `kept`, what a gated block in one node does not keep

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TokenBytes":
        """Return those of a language model, from its sizes."""
        hidden = config.hidden_size
        wide = getattr(config, "intermediate_size", None) or 4 * hidden
        if chosen := getattr(config, "num_experts_per_tok", None):  # each has its copy of the token, before and after
            inner = getattr(config, "moe_intermediate_size", None) or wide
            wide = chosen * inner + chosen * 2 * hidden // 3
        layers, heads = config.num_hidden_layers, getattr(config, "num_attention_heads", None) or 1
        width = getattr(config, "head_dim", None) or hidden // heads
        keys = 2 * width * (getattr(config, "num_key_value_heads", None) or heads)
        fused = getattr(config, "hidden_act", None) in FUSED_ACTIVATIONS
        # Measured on dense models; those whose norms, gates or experts are modules of their own hold more copies.
        layer = 13 * hidden + 4 * wide if fused and not chosen else 20 * hidden + 6 * wide
        # Both norms keep their input and output, attention its query, keys, values and output, the next layer a copy of
        # that output, and a gated block both factors and their product. Other layers are not fused, and keep more.
        kept = 4 * hidden + 3 * heads * width + keys + 3 * wide
        if not fused:
            kept = layer
        block = 0 if chosen else (4 if fused else 6) * wide
        product = wide if fused and not chosen else 0
        sizes = (layer, min(kept, layer), min(wide, layer - min(kept, layer)), block, hidden, layers * keys, product)
        return cls(layers, *(HALF_BYTES * size for size in sizes))

    def saved(self, savings: Savings) -> int:
        """Return the bytes of a token's activations when a forward ends."""
        if not savings.recompute:
            return self.layers * self.kept
        return (LAYERS_IN_FLIGHT if savings.offload_activations else self.layers) * self.inputs

    def peak(self, savings: Savings) -> int:
        """Return the bytes of a token's activations at the peak of a step, in the backward of one layer."""
        return self.saved(savings) + self.layer - (0 if savings.recompute else self.kept)

    def row_peak(self, tokens: int, savings: Savings) -> int:
        """Return the bytes of a row's activations in the backward of one layer."""
        if savings.tiled_above is None or tokens <= savings.tiled_above:
            return tokens * self.peak(savings)
        return tokens * (self.peak(savings) - self.block) + TILE * self.block

    def tokens_in(self, free: float, savings: Savings) -> float:
        """Return the most tokens of a row whose activations fit into so many bytes in the backward of one layer."""
        whole = free / self.peak(savings)
        if savings.tiled_above is None:
            return whole
        tiled = (free - TILE * self.block) / (self.peak(savings) - self.block)
        return tiled if tiled > savings.tiled_above else min(whole, savings.tiled_above)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory depends on."""

    parameters: int
    largest: int  # numbers in its largest weight
    linear: dict[str, int]  # inputs plus outputs, summed over the linear layers of a name
    linear_parameters: int
    token: TokenBytes
    vocabulary: int
    experts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of expert weights, by their whole names
    positions: int | None = None  # that a sequence may have at most, where the model says so
    modules: dict[str, dict[str, int]] = field(default_factory=dict)  # sizes of weights by names, by module name
    stored: Stored = field(default_factory=Stored)

    def head_bytes(self, savings: Savings, tokens: int | None = None) -> int:
        """Return the bytes of the projections of one chunk and their gradients, of at most so many tokens."""
        rows = min((count for count in (savings.head_chunk, tokens) if count is not None), default=None)
        return HEAD_CHUNK if rows is None else min(HEAD_CHUNK, rows * self.vocabulary * 2 * HALF_BYTES)

    def activation_bytes(self, tokens: int, savings: Savings) -> int:
        """Return the bytes of a forward's activations at the peak of a step: in the head, or in a layer's backward."""
        head = tokens * self.token.saved(savings) + self.head_bytes(savings, tokens)
        return max(head, self.token.row_peak(tokens, savings))

    def quantised(self) -> "Shape":
        """Return the sizes of the model with weights that are quantised in another way than QLoRA's."""
        return replace(self, token=replace(self.token, kept=self.token.kept + self.token.gate, gate=0))

    def with_block_nodes(self) -> "Shape":
        """Return the sizes of the model with gated blocks of one node each; its peak was not measured and stays."""
        return replace(self, token=replace(self.token, kept=self.token.kept - self.token.product, product=0))

    def tokens_in(self, free: float, savings: Savings) -> int:
        """Return the most tokens of a forward whose activations fit into so many bytes."""
        saved, chunk, logits = self.token.saved(savings), self.head_bytes(savings), self.head_bytes(savings, 1)
        of_one_chunk = min(free / (saved + logits), chunk / max(logits, 1))
        in_head = max((free - chunk) / saved, of_one_chunk)
        return max(int(min(in_head, self.token.tokens_in(free, savings))), 0)


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose."""

    weights: float
    training: float  # masters, gradients, optimizer, the reference, teachers
    activations: float
    sampler: float = 0.0  # keys and values that stay while training

    @property
    def total(self) -> float:
        return self.weights + self.training + self.activations + self.sampler


def empty_model(section: ModelSection, head: Head) -> PreTrainedModel:
    """Return a model as it is trained, of which only the config is read."""
    with set_zero3_state():  # which says that weights are cut elsewhere: here there are none
        return model_without_weights(section, head, config_with_head(section, head))


def shape_of(section: ModelSection, head: Head) -> Shape:
    """Return a model's sizes, from its config."""
    model = empty_model(section, head)
    config = model.config
    names = linear_names(model)
    linear: Counter[str] = Counter()
    inside = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        ending = next((one for one in names if f".{name}".endswith(f".{one}")), None)
        if ending is not None and isinstance(weight, nn.Parameter):
            linear[ending] += sum(weight.shape)
            inside += weight.numel()
    experts = {name: tuple(weight.shape) for name, weight in model.named_parameters() if _is_expert(name, weight)}
    sizes = [weight.numel() for weight in model.parameters()]
    text = config.get_text_config()
    vocabulary, positions = getattr(text, "vocab_size", 0), getattr(text, "max_position_embeddings", None)
    token = TokenBytes.of(text)
    blocks = [module for module in model.modules() if is_gated_block(module)]
    if not blocks:
        token = replace(token, block=0)
    if not blocks or not all(map(_can_be_node, blocks)):
        token = replace(token, product=0)
    modules = _sizes_in_modules(model)
    stored = Stored.of(getattr(config, "quantization_config", None))
    shape = Shape(sum(sizes), max(sizes), dict(linear), inside, token, vocabulary, experts, positions, modules, stored)
    return shape if stored.bits is None else shape.quantised()


def _sizes_in_modules(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return the sizes of weights by their names, for the last name of every module; a tied weight has one name."""
    first = {id(weight): name for name, weight in model.named_parameters()}
    modules: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        inside = modules.setdefault(name.rpartition(".")[2], {})
        inside |= {first[id(weight)]: weight.numel() for weight in module.parameters()}
    return modules


def _can_be_node(block: Any) -> bool:
    """Return whether a gated block is one node where each of its layers has an adapter."""
    layers = [getattr(block, name, None) for name in GATED_PROJECTIONS]
    return all(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers)


def adapts_blocks(adapter: AdapterSection) -> bool:
    """Return whether an adapter is a plain LoRA on each layer of a gated block, by what its settings name."""
    if adapter.dropout or adapter.dora or adapter.layers is not None or adapter.folder or adapter.load_in_8bit:
        return False
    named = adapter.targets if isinstance(adapter.targets, list) else []
    every = adapter.target_linear or not (adapter.targets or adapter.target_parameters)
    return every or {*GATED_PROJECTIONS} <= {name.rpartition(".")[2] for name in named}


def _is_expert(name: str, weight: nn.Parameter) -> bool:
    return weight.ndim == 3 and name.rpartition(".")[2] in WEIGHTS


def adapter_parameters(shape: Shape, adapter: AdapterSection) -> int:
    """Return the parameters of an adapter with the config's rank on the weights it names, or on all linear layers.

    Modules that are trained whole beside it are counted too: they have a copy of their own.
    """
    named = [adapter.targets] if isinstance(adapter.targets, str) else adapter.targets or []
    chosen = [] if adapter.target_linear else [size for name, size in shape.linear.items() if name in named]
    direct = adapter.target_parameters or []
    direct = tuple(f".{name}" for name in ([direct] if isinstance(direct, str) else direct))
    experts = [size for name, size in shape.experts.items() if f".{name}".endswith(direct)] if direct else []
    if not chosen and (adapter.target_linear or named or not direct):
        chosen = list(shape.linear.values())
    whole: dict[str, int] = {}
    for name in adapter.modules_to_save or []:
        whole |= shape.modules.get(name.rpartition(".")[2], {})
    low_rank = adapter.rank * (sum(chosen) + sum(count * (rows + columns) for count, rows, columns in experts))
    return low_rank + sum(whole.values())


def optimizer_bytes(name: str) -> int:
    """Return the bytes of optimizer state for each trained parameter."""
    if "8bit" in name or "4bit" in name:
        return 2 if "8bit" in name else 1
    if "adafactor" in name or name.startswith("sgd"):
        return 0
    return SINGLE_BYTES if name.startswith(("lion", "muon")) else 2 * SINGLE_BYTES


def weight_bytes(
    shape: Shape, packed: AdapterSection | TeacherSection | None = None, number_bytes: float = HALF_BYTES
) -> float:
    """Return the bytes of a model's weights; `packed` says what is quantised, and the others have `number_bytes`."""
    bits = shape.stored.bits
    plain = number_bytes if bits is None else bits / 8 + SCALES
    each = next((size for name, size in QUANTISED_BYTES.items() if getattr(packed, name, False)), plain)
    quantised, unpacked = shape.linear_parameters, 0
    if getattr(packed, "pack_experts", False) and shape.experts:
        sizes = [prod(weight) for weight in shape.experts.values()]
        quantised, unpacked = quantised + sum(sizes), max(sizes)  # of one layer at a time, for its product
    return each * quantised + number_bytes * (shape.parameters - quantised + unpacked)


def teacher_bytes(config: Config) -> float:
    """Return the bytes of the weights of all teachers that are loaded in this process."""
    section = config.teacher
    if not config.method.needs_teacher:
        return 0.0
    total = 0.0
    for name, place in section.places.items():
        if not is_url(place) and place not in (LOGGED, SELF):
            key = "distill.teacher" if name is None else f"distill.teachers.{name}"
            with named_by(key):
                model = teacher_source(place, config.model, section.revision, key)
                total += weight_bytes(shape_of(model, "tokens"), section)
    return total


def keeps_start(config: Config) -> bool:
    """Return whether weights of the start, or their average, are kept beside those that are trained."""
    teaches_itself = config.method.needs_teacher and SELF in config.teacher.places.values()
    return config.method.needs_reference or (teaches_itself and config.method.self_teacher != "live")


def training_bytes(optimizer: str) -> int:
    """Return the bytes that the first step adds for each trained parameter: float32 gradient and optimizer state."""
    return SINGLE_BYTES + optimizer_bytes(optimizer)


def estimate(
    shape: Shape,
    trained: TrainedWeights,
    adapter: AdapterSection,
    *,
    optimizer: str,
    reference: bool,
    tokens: int,
    savings: Savings,
    teachers: float = 0.0,
    number_bytes: float = HALF_BYTES,
) -> Memory:
    """Return the peak memory of a step with one forward of `tokens`, computing in half precision.

    `teachers`: bytes of their weights; when offloaded they are on the device before activations are. `number_bytes`: of
    weights that are not quantised.
    """
    packed = adapter if adapter.load_in_8bit else AdapterSection(load_in_4bit=True, pack_experts=adapter.pack_experts)
    weights = weight_bytes(shape, packed if trained == "qlora" else None, number_bytes)
    count = shape.parameters if trained == "all" else adapter_parameters(shape, adapter)
    # A float32 master and its gradient, the optimizer's state, and for adapters the copy that forwards read.
    training = count * (SINGLE_BYTES + training_bytes(optimizer) + (0 if trained == "all" else HALF_BYTES))
    beside = teachers
    if trained == "all":
        training += 3 * SINGLE_BYTES * shape.largest
        beside += HALF_BYTES * shape.parameters if reference else 0
    away = savings.offload_reference
    activations = max(shape.activation_bytes(tokens, savings), beside if away else 0.0)
    return Memory(weights, training + (0.0 if away else beside), activations)


def usable(card: float, fixed: float) -> float:
    """Return the bytes of a GPU that a step can use, of which weights and training take a fixed part."""
    room = card - DRIVER_BYTES - fixed - HOLES * min(fixed, card)
    return fixed + (USABLE_SHARE if room > 0 else 1) * room


def longest(shape: Shape, memory: Memory, available: float, *, savings: Savings, sequences: int = 1) -> int:
    """Return the tokens that `sequences` sequences of one forward may each have with so many bytes."""
    free = available - memory.weights - memory.training - memory.sampler
    return shape.tokens_in(free, savings) // sequences


def sampler_bytes(free: float, reserved: float = 0.0) -> int:
    """Return what keys and values of sampling in this process may take, of the bytes that are free at a rollout.

    `reserved`: bytes that the first step will still allocate for gradients and the optimizer.
    """
    return max(int(SAMPLER_SHARE * (free - reserved)), 0)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device, those that it holds unused included."""
    if device.type == "cuda":
        held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        # A limit of this process alone (`set_per_process_memory_fraction`) is not in what the driver says is free.
        return min(torch.cuda.mem_get_info(device)[0] + held - used, total_memory(device) - used)
    return psutil.virtual_memory().available


def total_memory(device: torch.device) -> int:
    """Return the bytes of a device that this process may use."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(torch.cuda.mem_get_info(index)[1] * torch.cuda.get_per_process_memory_fraction(index))
    return psutil.virtual_memory().total


def smaller_rows(budget: int, largest: int, unit: int) -> int | None:
    """Return a token budget that cuts the largest row of a step; None where it is one unit, or small already."""
    tokens = min(budget, largest)
    return max(tokens // 2, MIN_TOKEN_BUDGET) if tokens > max(unit, MIN_TOKEN_BUDGET) else None


def out_of_memory(where: str, budget: int, given_up: Sequence[str] = ()) -> str:
    """Return the error message with the remedies, cheapest first; `given_up`: what was tried already."""
    halved = f"set 'token_budget: {max(budget // 2, MIN_TOKEN_BUDGET)}'; " if not given_up else ""
    tried = f" (after {', '.join(given_up)})" if given_up else ""
    return f"out of GPU memory {where} with token_budget {budget}{tried}. In this order: {halved}{LESS_MEMORY}."
