"""Which ways of training `upweight new` writes, so that the model fits in memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from upweight.cli.starter.plan import Plan, content
from upweight.errors import UserError

if TYPE_CHECKING:
    from upweight.config import Config
    from upweight.models.memory_plan import MemoryPlan


def choose_memory_unread(plan: Plan, output: Path) -> None:
    """Choose by the model's config alone, or for a GPU that was named by the size in the model's name."""
    from upweight.cli.fits import model_of_size, near_size, size_for

    try:
        choose_memory(plan, output)
        return
    except UserError:  # of which the note about lengths has told
        plan.memory = {}
    if plan.gpu is None:
        plan.notes.append("memory is not checked, for the same cause")
        return
    size = size_for(plan.model)
    if size is None:
        remedy = f"`upweight fits {near_size(plan.model)} --memory {plan.gpu:g}` says what fits of that size"
        plan.notes.append(f"memory is not checked, for the same cause; {remedy}")
        return
    with model_of_size(size) as (folder, shape):
        choose_memory(plan, output, folder)
    plan.notes.append(f"memory is counted with the shape of {shape}, by the model's name")


def choose_memory(plan: Plan, output: Path, shape: str | Path | None = None) -> None:
    """Take the first way of training whose estimate fits; `shape`: a folder with another model's config to count by."""
    from upweight.config import parse_config
    from upweight.models.memory import GIB
    from upweight.models.memory_plan import ModelNeeds, plan_memory

    card = None if plan.gpu is None else plan.gpu * GIB

    def planned() -> "Config":
        named = {} if shape is None else {"base_model": str(shape)}
        return parse_config(content(plan) | named, folder=output.resolve().parent)

    def estimated(way: dict[str, str]) -> "MemoryPlan":
        plan.memory = way
        return plan_memory(planned(), card)

    recompute = {"memory": "fast   # recomputes layers where memory is short"}
    four_bits = {"adapter": "qlora", "load_in_4bit": "true   # needs bitsandbytes"}
    estimate = estimated({})
    ways = [recompute, {**recompute, **four_bits}, {"memory": "lean", **four_bits}]
    if not estimate.fits:
        of_model = ModelNeeds.of(planned()).shape
        if not of_model.stored.takes_4bit:
            ways = [recompute, {"memory": "lean"}]
        elif of_model.experts:
            ways += [{**way, "quantize_moe_experts": "true"} for way in ways[1:]]
    for way in ways:
        if not estimate.fits:
            estimate = estimated(way)
    plan.notes.append(f"memory: {estimate.line()}" + ("" if estimate.fits else ": too little; take a smaller model"))
    if estimate.fits and plan.memory:
        keys = ", ".join(f"'{key}: {value.partition(' ')[0]}'" for key, value in plan.memory.items())
        package = "; 4 bits need bitsandbytes (pip install bitsandbytes)" if "load_in_4bit" in plan.memory else ""
        plan.notes.append(f"it fits with {keys}, which the config sets{package}")
