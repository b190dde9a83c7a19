"""The end of `upweight new`: the files that it writes, what is missing, and the commands that can be run next."""

import shlex
from pathlib import Path

from upweight.cli.starter.plan import REWARDS, Plan, answer_reward, text_of
from upweight.log import fitted, logger


def write(plan: Plan, output: Path) -> None:
    """Write the config and an example of a reward, and print what was found and how to go on."""
    output.parent.mkdir(parents=True, exist_ok=True)
    rewards = output.parent / "rewards.py"
    output.write_text(text_of(plan, output), encoding="utf-8")
    if plan.method == "grpo" and not plan.answer and not rewards.exists():
        rewards.write_text(REWARDS.format(config=output), encoding="utf-8")
        plan.notes.append(f"rewards: {rewards} has an example; say there what a good answer is")
    if plan.method == "grpo" and plan.answer:
        kind = answer_reward(plan)
        plan.notes.append(f"rewards: the built-in reward {kind} compares with {plan.answer!r}")
    for note in plan.notes:
        logger.info("%s", note)
    print(output, flush=True)
    if plan.missing is None:
        print(f"next: {_commands(output)}")
        return
    from upweight.models.hub import MAKE_TINY, TINY, models_like

    print(fitted(plan.missing))
    if here := models_like(plan.model):
        print(f"next, with a model that is here: {_commands(output, here[0])}")
    else:
        print(f"next, with a tiny model that learns nothing useful: {MAKE_TINY}, then {_commands(output, TINY)}")


def _commands(output: Path, model: str | None = None) -> str:
    """Return the commands that show the rows and train, with another model than the config's where one is named."""
    named = shlex.quote(str(output))
    keys = "" if model is None else f" {shlex.quote(f'base_model={model}')}"
    return f"upweight preprocess {named} --show 2{keys}, then upweight train {named}{keys}"
