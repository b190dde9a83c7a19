"""`upweight fits`: which ways of training a config's model fit on a card, and what to change."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import log
from pathlib import Path

import torch

from upweight.cli.inputs import RUN, is_of_run, read_config
from upweight.config import Config, parse_config
from upweight.config.peers import method_advice
from upweight.config.resolve import memory_settings
from upweight.config.sections.model import AdapterSection
from upweight.config.yaml_file import apply_overrides
from upweight.errors import UserError, did_you_mean
from upweight.methods import METHODS
from upweight.models.memory import GIB, TrainedWeights, teacher_bytes, total_memory
from upweight.models.memory_plan import MemoryPlan, ModelNeeds, plan_memory, row_tokens, trained_weights
from upweight.user_modules import is_path

TRAINED_KINDS: tuple[TrainedWeights, ...] = ("all", "lora", "qlora")
PACKED = "qlora+experts"  # QLoRA with the experts of a mixture in 4 bits too
FOUR_BITS = "'load_in_4bit: true'"
BITSANDBYTES = "; 4 bits need bitsandbytes (pip install bitsandbytes)"
MODES = ("fast", "balanced", "lean")
HEADINGS = ("trained", "memory", "weights", "training", "activations", "sampler", "total", "fits", "longest")
ADAPTER_KEYS = {
    "all": "no 'adapter'",
    "lora": "'adapter: lora'",
    "qlora": f"'adapter: qlora' with {FOUR_BITS}",
    PACKED: f"'adapter: qlora' with {FOUR_BITS} and 'quantize_moe_experts: true'",
}
SMALLER = {"balanced": ("balanced", "fast", "lean"), "fast": ("fast", "lean"), "lean": ("lean",)}  # the fastest first
MIXTURE = re.compile(r"\d+x\d+(\.\d+)?B|\dB-A\d+(\.\d+)?B", re.IGNORECASE)  # in the name of a mixture of experts
# How a method is chosen that `rl` does not name.
CHOSEN = {"sft": {}, "reward": {"reward_model": True}, "prm": {"process_reward_model": True}}
ASSUMED = "what is assumed of a model alone: LoRA, 'memory: balanced' unless it is set"
# What else may make a config fit, tried where adapter and mode do not: words of the answer, section, values.
OTHER_KEYS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("'gradient_checkpointing: true'", "optim", {"gradient_checkpointing": True}),
    ("'distill.teacher_load_in_4bit: true'", "teacher", {"load_in_4bit": True}),
    (f"{FOUR_BITS} in place of 'load_in_8bit'", "adapter", {"load_in_4bit": True, "load_in_8bit": False}),
    ("'lora_r: 16'", "adapter", {"rank": 16}),
    ("no 'lora_modules_to_save'", "adapter", {"modules_to_save": None}),
)
WORTHWHILE = 8  # the part of a config's length below which no shorter one is proposed beside other keys
Way = tuple[str, str]  # which weights, in which mode
# Shapes by size, for those who ask before they have a model, or without a network.
SHAPE_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QWEN = {"model_type": "qwen2", "vocab_size": 152_064, "max_position_embeddings": 32_768, "tie_word_embeddings": False}
TIED = {**QWEN, "vocab_size": 151_936, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": False}
SIZES = {
    "0.5B": ("Qwen2.5-0.5B", TIED, (896, 4_864, 24, 14, 2)),
    "1B": ("Llama-3.2-1B", {**LLAMA, "tie_word_embeddings": True}, (2_048, 8_192, 16, 32, 8)),
    "1.5B": ("Qwen2.5-1.5B", TIED, (1_536, 8_960, 28, 12, 2)),
    "3B": ("Qwen2.5-3B", TIED, (2_048, 11_008, 36, 16, 2)),
    "7B": ("Qwen2.5-7B", QWEN, (3_584, 18_944, 28, 28, 4)),
    "8B": ("Llama-3.1-8B", LLAMA, (4_096, 14_336, 32, 32, 8)),
    "14B": ("Qwen2.5-14B", QWEN, (5_120, 13_824, 48, 40, 8)),
    "32B": ("Qwen2.5-32B", QWEN, (5_120, 27_648, 64, 40, 8)),
    "70B": ("Llama-3.1-70B", LLAMA, (8_192, 28_672, 80, 64, 8)),
}


def run(target: str | Path, overrides: list[str], *, memory: float | None, method: str | None = None) -> int:
    """Print one line for each way of training, and whether the config fits or what to change; return 1 if not."""
    if memory is None:
        if not torch.cuda.is_available():
            raise UserError("no GPU is visible here; say how much memory the card has, in GiB: --memory 24")
        memory = total_memory(torch.device("cuda")) / GIB
    of_run = Path(target).expanduser() / RUN
    target = of_run if is_of_run(of_run) else target
    with model_of_size(target) as (source, name):
        config = _config_of(source, overrides, method)
        modes = {mode: _config_of(source, [*overrides, *_in_mode(mode, config)], method) for mode in MODES}
        try:
            lines, is_fitting = report(config, modes, memory * GIB, "this config" if _is_file(source) else ASSUMED)
        except UserError as error:
            if Path(config.model.base_model or ".").expanduser().exists():
                raise
            remedy = (
                "The weights are not needed here: `upweight fits FOLDER` reads a folder with the model's config.json"
            )
            model = str(config.model.base_model)
            of_size = f", and `upweight fits {near_size(model)}` a shape of that size"
            if MIXTURE.search(model):
                of_size = "; of mixtures of experts no shape is known by its size"
            raise UserError(f"{error}. {remedy}{of_size}.") from error
    if name is not None:
        print(f"{target} is counted with the shape of {name}")
    print("\n".join(lines))
    return int(not is_fitting)


def near_size(name: str) -> str:
    """Return the known size that is nearest to the one in a model's name; 7B for a name without one."""
    weights = _billions_in(name)
    return min(SIZES, key=lambda size: abs(log(float(size[:-1]) / weights))) if weights else "7B"


def size_for(name: str) -> str | None:
    """Return the smallest known size that is not below the one in a model's name; None where there is none."""
    weights = _billions_in(name)
    return next((size for size in SIZES if weights and float(size[:-1]) >= weights), None)


def _billions_in(name: str) -> float:
    """Return the billions of weights that a model's name says that it has; 0 where it says none."""
    named = re.search(r"(?<![\d.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", name, re.IGNORECASE)
    return float(named[1]) / (1000 if named[2] in "mM" else 1) if named else 0.0


@contextmanager
def model_of_size(target: str | Path) -> Iterator[tuple[str | Path, str | None]]:
    """Yield a folder with the config of a model of the size that was named, and its name; others as they are."""
    size = str(target).upper()
    if not re.fullmatch(r"\d+(\.\d+)?[BM]", size) or Path(target).exists():
        yield target, None
        return
    if size not in SIZES:
        raise UserError(f"{target}: the sizes that are known without a model are {', '.join(SIZES)}; name the nearest")
    name, fields, shape = SIZES[size]
    with tempfile.TemporaryDirectory() as folder:
        config = {**fields, **dict(zip(SHAPE_FIELDS, shape, strict=True)), "dtype": "bfloat16"}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder, name


def _is_file(target: str | Path) -> bool:
    """Return whether a config was named, not a model alone."""
    path = Path(target).expanduser()
    return (path.is_file() and path.suffix != ".gguf") or path.suffix in (".yaml", ".yml")


def _in_mode(mode: str, config: Config) -> list[str]:
    """Return the overrides by which a config has another value of `memory`."""
    untiled = mode == "balanced" and not config.set_keys.get("gradient_checkpointing")  # which tiles need
    return [f"memory={mode}", *(["tiled_mlp=false"] if untiled and config.optim.tiled_mlp else [])]


def _config_of(target: str | Path, overrides: list[str], method: str | None) -> Config:
    """Return the config in a file, or that of a model alone, which a LoRA trains by a method."""
    path = Path(target).expanduser()
    if _is_file(path):
        if method is not None:
            raise UserError("--method: the config chooses the method; leave it out, or set it: rl=NAME")
        return read_config(path, overrides)
    names = [*CHOSEN, *(name for name in METHODS if name not in ("orm", *CHOSEN))]
    if method is not None and method not in names and not is_path(method):
        hint = method_advice(method) or did_you_mean(method, names)
        raise UserError(f"--method {method}: none of {', '.join(names)}.{hint}")
    chosen = CHOSEN.get(method or "sft", {"rl": method})
    content = {"base_model": str(target), "adapter": "lora", "lora_target_linear": True, **chosen}
    return parse_config(apply_overrides(content, overrides), folder=Path.cwd(), fragment=True)


def report(
    config: Config, modes: dict[str, Config], card: float, marked: str = "this config"
) -> tuple[list[str], bool]:
    """Return the estimates as lines, the config's way marked, and whether it fits; `modes`: the config in each mode."""
    model = ModelNeeds.of(config)
    kinds = _kinds(config, model)
    configured: Way = trained_weights(config), config.optim.memory
    plans: dict[Way, MemoryPlan] = {
        (trained, mode): plan_memory(modes[mode], card, trained, model) for trained in kinds for mode in MODES
    }
    if model.shape.experts and "qlora" in kinds and _may_pack(config):
        plans |= {(PACKED, mode): plan_memory(_packed(modes[mode]), card, "qlora", model) for mode in MODES}
    rows: list[tuple[str, ...]] = [HEADINGS]
    for (trained, mode), plan in plans.items():
        need = plan.need
        sizes = need.weights, need.training, need.activations, need.sampler, need.total
        mark = "* " if (trained, mode) == configured else ""
        cells = [f"{size / GIB:.1f}" for size in sizes]
        rows.append((mark + trained, mode, *cells, "yes" if plan.fits else "no", str(plan.longest)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    length, sequences = row_tokens(config)
    method, bits = model.shape.stored
    stored = "bfloat16" if bits is None else f"{bits} bits, as {method} stores them"
    what = f"{model.shape.parameters / 1e9:.2f} billion weights in {stored}, {config.method.label}"
    what += f" on sequences of {length:,} tokens, at least {sequences} in a forward"
    beside = f", teachers of {model.teachers / GIB:.1f} GiB" if model.teachers else ""
    if config.method.needs_teacher and not config.teacher.places:
        beside = ", no teacher (distill.teacher=FOLDER counts one)"
    sharded = config.sharding.fsdp or config.sharding.deepspeed is not None
    whole = ", which holds all weights (shards are not counted)" if sharded else ""
    legend = f"GiB on one GPU of {card / GIB:.3g} GiB{whole}; longest: tokens that fit; * is {marked}"
    about = ["; ".join(filter(None, [f"{what}{beside}", model.shape.stored.missing_packages()])), legend]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    too_long = model.shape.positions and length > model.shape.positions
    bound = ""
    if model.shape.positions and too_long:
        bound = f"; but the model has only {model.shape.positions:,} positions for the {length:,} tokens"
        if (shorter := _shorter(config, model.shape.positions)) is not None:
            bound += f": set {shorter} or less"
    return [*about, *table, answer(config, modes, plans, card, model) + bound], plans[configured].fits and not too_long


def _kinds(config: Config, model: ModelNeeds) -> list[TrainedWeights]:
    """Return what may be trained of a model; raise where the config asks for what its stored weights do not allow."""
    stored, source = model.shape.stored, config.model.base_model or ""
    if (problem := stored.problem(config.adapter, source)) is not None:
        raise UserError(problem)
    ways: dict[TrainedWeights, AdapterSection] = {
        kind: AdapterSection(kind=None if kind == "all" else kind, load_in_4bit=kind == "qlora")
        for kind in TRAINED_KINDS
    }
    return [kind for kind, adapter in ways.items() if stored.problem(adapter, source) is None]


def answer(
    config: Config, modes: dict[str, Config], plans: dict[Way, MemoryPlan], card: float, model: ModelNeeds
) -> str:
    """Say whether the config fits, else the smallest change with which it does."""
    trained, mode = configured = trained_weights(config), config.optim.memory
    mine = plans[configured]
    if mine.fits:
        size = f"about {mine.need.total / GIB:.1f} of the {mine.available / GIB:.1f} GiB of a GPU that can be used"
        return f"this config fits ('memory: {mode}'): {size}, sequences of up to {mine.longest:,} tokens"
    kinds = [*TRAINED_KINDS[TRAINED_KINDS.index(trained) :], PACKED]
    ways: list[Way] = [(kind, one) for kind in kinds for one in SMALLER[mode] if (kind, one) in plans]
    room = f"{mine.available / GIB:.1f} GiB of a GPU can be used"
    size = f"it needs about {mine.need.total / GIB:.1f} GiB, and {room}"
    for way in ways:
        if plans[way].fits:
            total = plans[way].need.total / GIB
            is_new = way[0] in ("qlora", PACKED) and trained != "qlora"
            package = BITSANDBYTES if is_new else ""
            changes = f"Set {_changes(configured, way, modes[way[1]])}: about {total:.1f} GiB{package}"
            shorter = _same_weights_shorter(config, modes, plans) if way[0] != trained else ""
            return f"this config does not fit: {size}. {changes}{shorter}"
    others = list(_other_keys(modes, ways, card, model))
    for key, way, plan, changed in others:
        if plan.fits:
            changes = _joined(key, _changes(configured, way, changed))
            package = BITSANDBYTES if "4bit" in changes and not config.adapter.load_in_8bit else ""
            return f"this config does not fit: {size}. Set {changes}: about {plan.need.total / GIB:.1f} GiB{package}"
    best = max(ways, key=lambda way: plans[way].longest)
    for key, way, plan, changed in [
        ("", best, plans[best], modes[best[1]]),
        *sorted(others, key=lambda other: (" and " in other[0], -other[2].longest)),
    ]:
        if (shorter := _shorter(config, plan.longest)) is not None:
            changes = _joined(shorter, key, _changes(configured, way, changed))
            return f"this config does not fit: {size}. Set {changes}; or 'fsdp: true' over more GPUs"
    smaller = "a smaller teacher or one on a server ('distill.teacher: URL'), " if model.teachers else ""
    return f"this config does not fit: {size}. Take {smaller}a smaller model, or 'fsdp: true' over more GPUs"


def _joined(*changes: str) -> str:
    return " and ".join(filter(None, changes))


def _same_weights_shorter(config: Config, modes: dict[str, Config], plans: dict[Way, MemoryPlan]) -> str:
    """Return the length with which a config trains the weights that it names; nothing where too little is left."""
    trained, mode = configured = trained_weights(config), config.optim.memory
    way = max(((trained, one) for one in SMALLER[mode]), key=lambda one: plans[one].longest)
    longest = plans[way].longest
    if longest * WORTHWHILE < row_tokens(config)[0] or (shorter := _shorter(config, longest)) is None:
        return ""
    changes = _joined(shorter, _changes(configured, way, modes[way[1]]))
    return f"; or train the same weights on shorter sequences: {changes}"


def _shorter(config: Config, longest: int) -> str | None:
    """Return the key of the length with which sequences have at most so many tokens; None where it leaves too few."""
    if config.method.online_settings is None:
        return f"'sequence_len: {longest}'" if longest else None
    prompt = row_tokens(config)[0] - config.method.online_settings.max_completion_length
    return f"'trl.max_completion_length: {longest - prompt}'" if longest > prompt else None


def _other_keys(
    modes: dict[str, Config], ways: list[Way], card: float, model: ModelNeeds
) -> Iterator[tuple[str, Way, MemoryPlan, Config]]:
    """Yield keys beside adapter and mode that a config may change, each and then all, with each way, plan and config.

    A teacher in 4 bits is named where that makes it smaller, and stays on the GPU.
    """
    teachers = _teachers_in_4_bits(modes["balanced"], model)
    offered = [one for one in OTHER_KEYS if one[1] != "teacher" or teachers is not None]
    for keys in [*([one] for one in offered), offered]:
        for kind, mode in ways:
            changed, needs = modes[mode], model
            differing = [(key, section, names) for key, section, names in keys if _differs(changed, section, names)]
            if kind in ("all", PACKED) or not differing or (keys is offered and len(differing) == 1):
                continue
            for _, section, names in differing:
                changed = replace(changed, **{section: getattr(changed, section).model_copy(update=names)})
                if section == "teacher" and teachers is not None:
                    needs = replace(model, teachers=teachers)
                    stays = changed.optim.model_copy(update={"reference_offloading": False})
                    changed = replace(changed, optim=stays)
            trained: TrainedWeights = "qlora" if kind == "qlora" or changed.adapter.load_in_4bit else "lora"
            plan = plan_memory(changed, card, trained, needs)
            yield _joined(*(key for key, _, _ in differing)), (kind, mode), plan, changed


def _teachers_in_4_bits(config: Config, model: ModelNeeds) -> float | None:
    """Return the bytes of teachers whose weights are in 4 bits; None where that is not possible, or saves nothing."""
    is_kept = config.sharding.fsdp or "reference_offloading" in config.set_keys  # which 4 bits do not go with
    if not model.teachers or is_kept or config.teacher.load_in_4bit or config.teacher.load_in_8bit:
        return None
    smaller = teacher_bytes(replace(config, teacher=config.teacher.model_copy(update={"load_in_4bit": True})))
    return smaller if smaller < 0.9 * model.teachers else None


def _differs(config: Config, section: str, names: dict[str, object]) -> bool:
    """Return whether keys have other values in a config; 4 bits are only named in the place of 8."""
    old = getattr(config, section)
    if "load_in_8bit" in names and not config.adapter.load_in_8bit:
        return False
    return any(getattr(old, name) != value for name, value in names.items())


def _may_pack(config: Config) -> bool:
    """Return whether the experts of a mixture could be in 4 bits too, and are not."""
    return not (config.adapter.pack_experts or config.sharding.fsdp or config.sharding.deepspeed is not None)


def _packed(config: Config) -> Config:
    four_bits = {"load_in_4bit": True, "load_in_8bit": False, "pack_experts": True}
    return replace(config, adapter=config.adapter.model_copy(update=four_bits))


def _changes(configured: Way, way: Way, changed: Config) -> str:
    """Return the keys that lead from one way of training to another; `changed`: the config in the mode of that way."""
    keys = [ADAPTER_KEYS[way[0]]] if way[0] != configured[0] else []
    if way[0] == PACKED and changed.adapter.load_in_4bit:
        keys = ["'quantize_moe_experts: true'"]
    elif way[0] == PACKED and changed.adapter.load_in_8bit:
        keys = [ADAPTER_KEYS[PACKED].replace(FOUR_BITS, f"{FOUR_BITS} in place of 'load_in_8bit'")]
    if way[1] != configured[1]:
        chosen = ", ".join(memory_settings(changed))
        keys.append(f"'memory: {way[1]}' (which sets {chosen})" if chosen else f"'memory: {way[1]}'")
    return " and ".join(keys)
