"""A run from its config to its result, in reading order: read this file first.

`config/load.py` has read the YAML. `train` calls `assemble`, which builds the parts of the trainer: tokenizer, rows
(`data/prepare.py`), rewards, policy, rollouts. The loop is transformers' Trainer, which calls `training_step` of
`trainer.py` with the samples of one optimizer step, from `loader.py`, or for online methods from `online/feed.py`:
rollouts of `rollout/producer.py` with rewards of `rewards/scorer.py`. `step.py` forwards them in packed rows
(`engine/`; `engine/head.py` has the backward of the head) and computes the loss (`methods/`) and its gradients.
"""

import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from accelerate.utils import fsdp2_prepare_model
from transformers import PrinterCallback, TrainerCallback

from upweight.config import Config
from upweight.errors import UserError
from upweight.files import remove_partials
from upweight.heartbeat import activity, heartbeat
from upweight.log import logger
from upweight.runs.checkpoints import (
    MERGED,
    checkpoints_of,
    last_whole_checkpoint,
    named_checkpoint,
    nothing_to_resume,
    step_of,
)
from upweight.runs.command import training_into
from upweight.runs.files import RECORD, read_json
from upweight.runs.lock import lock_folder
from upweight.train.assemble import assemble
from upweight.train.distributed.fsdp import layout_of
from upweight.train.distributed.ranks import broadcast_from_rank0, init_single_rank
from upweight.train.machine_checks import require_machine
from upweight.train.recording.model_card import model_card
from upweight.train.recording.run_folder import (
    changed_keys,
    named_verdicts,
    recording,
    require_same_data,
    require_same_resume_keys,
    require_steps_left,
    write_config,
)
from upweight.train.trainer import MethodTrainer


def train(config: Config, *, resume: bool = False, watchers: Sequence[TrainerCallback] = ()) -> None:
    """Train the model of a config and write the run folder; `watchers` are further callbacks."""
    folder = Path(config.run.output_dir)
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first and resume and config.run.resume_from is None and (missing := nothing_to_resume(folder)):
        logger.warning("warning: %s", missing)
    lock = lock_folder(folder) if is_first else nullcontext()
    with heartbeat(), activity(f"training into {folder}"), lock, training_into(folder):
        finished_before = _train_into(folder, config, resume, watchers)
    named = shlex.quote(str(folder))
    use = f'inference {named} --prompt "..."' if config.method.head == "tokens" else f"score {named} ROWS.jsonl"
    if finished_before:
        logger.info("this run is finished (%s); raise max_steps or num_epochs to go on", finished_before)
    if is_first and (reported := named_verdicts(folder)):
        logger.warning("warning: this run reports %s; what to do: upweight doctor %s", reported, named)
    logger.info("done: %s; try it: upweight %s", folder, use)


def _train_into(folder: Path, config: Config, resume: bool, watchers: Sequence[TrainerCallback]) -> str:
    """Train; return at which step the run had finished, if it was resumed with no step left."""
    trainer = build(config, resume=resume, trains=True)
    is_first = trainer.is_world_process_zero()
    checkpoint = broadcast_from_rank0(_checkpoint_to_resume(config, resume) if is_first else None)
    if checkpoint is not None:
        require_same_data(checkpoint, trainer.data_digest, allowed=config.run.allow_changed_data)
    if is_first:
        _prepare_run_folder(config, folder, checkpoint, resume)
    with recording(trainer, checkpoint, config, watchers=watchers) as stop:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            stop.restore()
            if trainer.rollouts is not None:
                trainer.rollouts.close()
        if trainer.state.global_step < trainer.state.max_steps:
            stop.exit_if_signalled(trainer.state)
        rows = len(trainer.train_dataset) if trainer.feed is None else trainer.feed.taken
        trainer.card = lambda: model_card(config, trainer.state.log_history, rows)
        trainer.save_model()
        trainer.create_model_card()
    step, steps = (step_of(checkpoint) or 0) if checkpoint else 0, trainer.state.max_steps
    return f"step {step} of {steps}" if step >= steps else ""


def evaluate(config: Config) -> dict[str, float]:
    """Return loss and metrics of a config's model on its evaluation data."""
    trainer = build(config)
    if trainer.eval_dataset is None:
        raise UserError("there is nothing to evaluate on. Set 'val_set_size' or 'test_datasets'.")
    if trainer.is_fsdp_enabled:  # accelerate shards only models with an optimizer
        trainer.model = trainer.model_wrapped = fsdp2_prepare_model(trainer.accelerator, trainer.model)
    metrics = trainer.evaluate()
    if trainer.feed is not None:
        trainer.feed.close()
    if trainer.rollouts is not None:
        trainer.rollouts.close()
    return {name: value for name, value in metrics.items() if name != "epoch"}  # of a training, and none ran


def build(config: Config, *, resume: bool = False, trains: bool = False) -> MethodTrainer:
    """Build the trainer of a config. With `trains`, weights may be loaded directly as shards."""
    require_machine(config, trains=trains)
    checkpoint = _checkpoint_to_resume(config, resume) if config.sharding.fsdp else None
    if config.sharding.deepspeed is not None or (checkpoint is not None and layout_of(checkpoint) == "fsdp"):
        init_single_rank()
    trainer = MethodTrainer(assemble(config, trains=trains))
    trainer.remove_callback(PrinterCallback)
    return trainer


def _prepare_run_folder(config: Config, folder: Path, checkpoint: Path | None, resume: bool) -> None:
    """Write config.yaml; refuse or warn where the folder of an earlier run does not fit."""
    if (resume or config.run.auto_resume) and checkpoint is None and checkpoints_of(folder):
        if read_json(folder / RECORD).get("state") == "done":  # a new run may write over a whole model
            raise UserError(
                f"output_dir: the run in {folder} finished, and none of its checkpoints is whole, so nothing can be "
                f"resumed. To train its model further: `base_model={folder}` with another output_dir (an adapter: "
                f"`lora_model_dir={folder}`); `--overwrite` trains from the beginning and replaces it."
            )
        logger.warning("warning: %s has no whole checkpoint; starting from the beginning", folder)
    changed = changed_keys(config, checkpoint.parent) if checkpoint else {}
    require_same_resume_keys(changed, checkpoint, config.optim.scheduler)
    require_steps_left(checkpoint, config.optim.max_steps)
    if changed:
        logger.warning("warning: changed since the run began: %s", "; ".join(changed.values()))
    if (folder / MERGED).is_dir():
        stale = "was merged from the adapter before this run; `merge-lora` writes it again"
        logger.warning("warning: %s %s", folder / MERGED, stale)
    remove_partials(folder)
    write_config(config, folder)


def _checkpoint_to_resume(config: Config, resume: bool) -> Path | None:
    """Return the checkpoint that the run resumes from, or None."""
    if config.run.resume_from is not None:
        return named_checkpoint(config.run.resume_from)
    return last_whole_checkpoint(Path(config.run.output_dir)) if resume or config.run.auto_resume else None
