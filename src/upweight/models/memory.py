"""Estimate the GPU memory of training from the shapes of a model, without loading it."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from upweight.config import Config
from upweight.config.sections.model import LOGGED, SELF, AdapterSection, ModelSection, TeacherSection
from upweight.config.servers import is_url
from upweight.models.adapters.attach import linear_names
from upweight.models.load import Head, config_with_head, model_class, teacher_source

GIB = 2**30
USABLE_SHARE = 0.9  # of a card: the rest is used by the driver or lost to fragmentation
HALF_BYTES, SINGLE_BYTES = 2, 4
USUAL_OPTIMIZER = "adamw"  # two moments in float32
TrainedWeights = Literal["all", "lora", "qlora"]
QUANTISED_BYTES = {"load_in_4bit": 0.53, "load_in_8bit": 1.02}  # bytes of a weight with its share of the scales
HEAD_CHUNK = 2**27 * 2 * SINGLE_BYTES  # projections of one chunk and their gradients: logits are never built as a whole
MIN_TOKEN_BUDGET = 256  # below which a step that ran out of memory is not tried again
LESS_MEMORY = (  # remedies, the cheapest first
    "'gradient_checkpointing: true'; 'activation_offloading: true'; a shorter 'sequence_len' or "
    "'trl.max_completion_length'; 'adapter: lora'; 'adapter: qlora' with 'load_in_4bit: true'; 'fsdp: true' over more "
    "GPUs; `upweight fits CONFIG` estimates each"
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that memory depends on."""

    parameters: int
    largest: int  # numbers in its largest weight
    linear: dict[str, int]  # inputs plus outputs, summed over the linear layers of a name
    linear_parameters: int
    activation_bytes: dict[bool, int]  # of a token, by whether layers are recomputed


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose."""

    weights: float
    training: float  # masters, gradients, optimizer, the reference, teachers
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.training + self.activations


def shape_of(section: ModelSection, head: Head) -> Shape:
    """Return a model's sizes, from its config."""
    config = config_with_head(section, head)
    with torch.device("meta"):
        model = model_class(section, head, config).from_config(config)
    names = set(linear_names(model))
    linear: Counter[str] = Counter()
    inside = 0
    for name, module in model.named_modules():
        last, weight = name.rpartition(".")[2], getattr(module, "weight", None)
        if last in names and isinstance(weight, nn.Parameter):
            linear[last] += sum(weight.shape)
            inside += weight.numel()
    sizes = [weight.numel() for weight in model.parameters()]
    text = config.get_text_config()
    by_token = {again: activation_bytes(text, checkpointing=again) for again in (False, True)}
    return Shape(sum(sizes), max(sizes), linear, inside, by_token)


def activation_bytes(config: PreTrainedConfig, *, checkpointing: bool) -> int:
    """Return the bytes of a token's activations in half precision; with checkpointing, one layer's and all inputs."""
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if chosen := getattr(config, "num_experts_per_tok", None):  # each has its copy of the token, before and after
        wide = chosen * (getattr(config, "moe_intermediate_size", None) or wide) + chosen * 2 * config.hidden_size // 3
    per_layer = HALF_BYTES * (20 * config.hidden_size + 6 * wide)
    layers = config.num_hidden_layers
    return HALF_BYTES * layers * config.hidden_size + per_layer if checkpointing else layers * per_layer


def adapter_parameters(shape: Shape, adapter: AdapterSection) -> int:
    """Return the parameters of an adapter with the config's rank on the layers it names, or on all linear ones."""
    named = [adapter.targets] if isinstance(adapter.targets, str) else adapter.targets or []
    chosen = [] if adapter.target_linear else [size for name, size in shape.linear.items() if name in named]
    return adapter.rank * sum(chosen or shape.linear.values())


def optimizer_bytes(name: str) -> int:
    """Return the bytes of optimizer state for each trained parameter."""
    if "8bit" in name:
        return 2
    if "adafactor" in name or name.startswith("sgd"):
        return 0
    return SINGLE_BYTES if name.startswith(("lion", "muon")) else 2 * SINGLE_BYTES


def weight_bytes(shape: Shape, packed: AdapterSection | TeacherSection | None = None) -> float:
    """Return the bytes of a model's weights in half precision; where `packed` says so, linear layers are quantised."""
    each = next((size for name, size in QUANTISED_BYTES.items() if getattr(packed, name, False)), HALF_BYTES)
    return each * shape.linear_parameters + HALF_BYTES * (shape.parameters - shape.linear_parameters)


def teacher_bytes(config: Config) -> float:
    """Return the bytes of the weights of all teachers that are loaded in this process."""
    section = config.teacher
    places = [place for place in section.places.values() if not is_url(place) and place not in (LOGGED, SELF)]
    if not config.method.needs_teacher:
        return 0.0
    models = [teacher_source(place, config.model, section.revision) for place in places]
    return sum(weight_bytes(shape_of(model, "tokens"), section) for model in models)


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
    checkpointing: bool,
    tokens: int,
    teachers: float = 0.0,
    offload: bool = False,
) -> Memory:
    """Return the peak memory of a step with one forward of `tokens`, computing in half precision.

    `teachers`: bytes of their weights; with `offload` they are on the device before activations are.
    """
    packed = adapter if adapter.load_in_8bit else AdapterSection(load_in_4bit=True)
    weights = weight_bytes(shape, packed if trained == "qlora" else None)
    count = shape.parameters if trained == "all" else adapter_parameters(shape, adapter)
    # A float32 master and its gradient, the optimizer's state, and for adapters the copy that forwards read.
    training = count * (SINGLE_BYTES + training_bytes(optimizer) + (0 if trained == "all" else HALF_BYTES))
    if trained == "all":
        training += 3 * SINGLE_BYTES * shape.largest + (HALF_BYTES * shape.parameters if reference else 0)
    activations = max(tokens * shape.activation_bytes[checkpointing], HEAD_CHUNK, teachers if offload else 0.0)
    return Memory(weights, training + (0.0 if offload else teachers), activations)


def longest(shape: Shape, memory: Memory, card: float, *, checkpointing: bool, sequences: int) -> int:
    """Return the tokens that `sequences` sequences of one forward may each have on a card of so many bytes."""
    free = USABLE_SHARE * card - memory.weights - memory.training
    return max(int(free / shape.activation_bytes[checkpointing] / sequences), 0) if free > HEAD_CHUNK else 0


def out_of_memory(where: str, budget: int) -> str:
    """Return the error message with the remedies, cheapest first."""
    halved = f"set 'token_budget: {max(budget // 2, MIN_TOKEN_BUDGET)}'"
    return f"out of GPU memory {where} with token_budget {budget}. In this order: {halved}; {LESS_MEMORY}."
