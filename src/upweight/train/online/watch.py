"""Show and write the completions of a training, and save its rollouts in checkpoints."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from upweight.config.sections.rollout import RolloutSection
from upweight.log import shows_status
from upweight.train.online.completions import CompletionFiles, ShownCompletions
from upweight.train.online.feed import SaveRollouts

LOOK_EVERY = 50  # steps between looks at completions on a terminal, where the config does not ask for them


def watch_rollouts(trainer: Any, section: RolloutSection, folder: Path, *, writes: bool) -> TrainerCallback:
    """Register what shows and writes completions; return the callback that saves rollouts in checkpoints."""
    rollouts = trainer.rollouts
    if trainer.is_world_process_zero():
        names, decode = rollouts.producer.names, rollouts.producer.decode
        if writes:
            files = CompletionFiles(folder, names, decode, rollouts.old_logps)
            rollouts.on_rollout.append(files)
            rollouts.on_evaluation.append(files.write_evaluation)
        every = int(trainer.args.logging_steps)
        if section.log_completions:
            rollouts.on_rollout.append(ShownCompletions(every, section.completions_shown or 4, names, decode))
        elif shows_status():  # a look now and then
            every = max(every, LOOK_EVERY)
            rollouts.on_rollout.append(ShownCompletions(every, section.completions_shown or 2, names, decode))
    return SaveRollouts(rollouts)
