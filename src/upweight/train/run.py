"""A run from its config to its result, in reading order: read this file first.

`train` calls `assemble`, which builds the parts of the trainer: tokenizer, rows, rewards, policy, rollouts. The loop is
transformers' Trainer (`trainer.py`). One item of its loader holds the samples of one optimizer step (`loader.py`, or
`online/feed.py` for online methods). `step.py` packs them into rows, forwards them and computes the method's loss. The
callbacks that log and save are in `recording/`.
"""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from accelerate import PartialState
from transformers import PrinterCallback, TrainerCallback

from upweight.config import Config
from upweight.errors import UserError
from upweight.log import logger
from upweight.runs.checkpoints import last_whole_checkpoint, named_checkpoint, set_aside, step_of
from upweight.runs.lock import lock_folder
from upweight.train.assemble import assemble
from upweight.train.distributed.fsdp import layout_of, shard_alone
from upweight.train.distributed.ranks import broadcast_from_rank0, init_single_rank
from upweight.train.recording.model_card import model_card
from upweight.train.recording.run_folder import changed_keys, refuse_other_weights, write_config
from upweight.train.recording.session import recording
from upweight.train.trainer import MethodTrainer


def train(config: Config, *, resume: bool = False, watchers: Sequence[TrainerCallback] = ()) -> None:
    """Train the model of a config and write the run folder; `watchers` are further callbacks."""
    folder = Path(config.run.output_dir)
    with lock_folder(folder) if int(os.environ.get("RANK", "0")) == 0 else nullcontext():
        _train_into(folder, config, resume, watchers)
    logger.info("done: %s", folder)
    PartialState().destroy_process_group()


def _train_into(folder: Path, config: Config, resume: bool, watchers: Sequence[TrainerCallback]) -> None:
    trainer = build(config, resume=resume, trains=True)
    checkpoint = broadcast_from_rank0(
        _prepare_run_folder(config, folder, resume) if trainer.is_world_process_zero() else None
    )
    with recording(trainer, config, watchers=watchers) as stop:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        finally:
            stop.restore()
            if trainer.rollouts is not None:
                trainer.rollouts.close()
        if trainer.state.global_step < trainer.state.max_steps:
            stop.exit_if_signalled(trainer.state)
        trainer.card = lambda: model_card(config, trainer.state.log_history, len(trainer.train_dataset))
        trainer.save_model()
        trainer.create_model_card()


def evaluate(config: Config) -> dict[str, float]:
    """Return loss and metrics of a config's model on its evaluation data."""
    trainer = build(config)
    if trainer.eval_dataset is None:
        raise UserError("there is nothing to evaluate on. Set 'val_set_size' or 'test_datasets'.")
    shard_alone(trainer)
    metrics = trainer.evaluate()
    if trainer.rollouts is not None:
        trainer.rollouts.close()
    PartialState().destroy_process_group()
    return metrics


def build(config: Config, *, resume: bool = False, trains: bool = False) -> MethodTrainer:
    """Build the trainer of a config. With `trains`, weights may be loaded directly as shards."""
    if config.sharding.deepspeed is not None or (config.sharding.fsdp and _resumes_shards(config, resume)):
        init_single_rank()
    trainer = MethodTrainer(assemble(config, trains=trains))
    trainer.remove_callback(PrinterCallback)
    return trainer


def _prepare_run_folder(config: Config, folder: Path, resume: bool) -> Path | None:
    """Write config.yaml, move newer checkpoints away, and return the checkpoint to resume from, if any."""
    checkpoint = _checkpoint_to_resume(config, resume)
    if resume and checkpoint is None:
        logger.warning("warning: %s has no whole checkpoint; starting anew", folder)
    changed = changed_keys(config, checkpoint.parent) if checkpoint else []
    refuse_other_weights(changed, checkpoint, config.optim.scheduler)
    if changed:
        logger.warning("warning: %s set otherwise than when the run began", ", ".join(changed))
    write_config(config, folder)
    set_aside(folder, (step_of(checkpoint) or 0) if checkpoint else 0)
    return checkpoint


def _checkpoint_to_resume(config: Config, resume: bool) -> Path | None:
    """Return the checkpoint that the run resumes from, or None."""
    if config.run.resume_from is not None:
        return named_checkpoint(config.run.resume_from)
    return last_whole_checkpoint(Path(config.run.output_dir)) if resume or config.run.auto_resume else None


def _resumes_shards(config: Config, resume: bool) -> bool:
    checkpoint = _checkpoint_to_resume(config, resume)
    return checkpoint is not None and layout_of(checkpoint) == "fsdp"
