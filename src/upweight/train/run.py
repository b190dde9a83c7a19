"""A run from its config to its result, in reading order."""

import math
import sys
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)

from upweight.config import Config
from upweight.data.prepare import prepare
from upweight.errors import UserError
from upweight.log import logger
from upweight.models.adapters import attach_adapter
from upweight.models.load import compute_dtype, disable_dropout, load_model
from upweight.models.save import save_model
from upweight.models.tokenizer import load_tokenizer
from upweight.train.arguments import training_arguments
from upweight.train.build import trainer_parts
from upweight.train.checkpoints import MarkWhole, last_whole_checkpoint, named_checkpoint, steps_of
from upweight.train.ranks import join_ranks
from upweight.train.run_folder import MetricsFile, cut_metrics, write_config
from upweight.train.trainer import MethodTrainer
from upweight.train.watch import Progress, StopOnNan, StopOnSignal


def train(config: Config, *, resume: bool = False) -> None:
    """Train what a config describes and write the run folder."""
    trainer, tokenizer = build(config)
    folder = Path(config.run.output_dir)
    checkpoint = _checkpoint(config, folder, resume)
    if trainer.is_world_process_zero():
        write_config(config, folder)
        cut_metrics(folder, steps_of(checkpoint) or 0 if checkpoint else -1)
    stop = next(c for c in trainer.callback_handler.callbacks if isinstance(c, StopOnSignal))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if stop.caught is not None:
        logger.warning("stopped at step %d; continue with --resume", trainer.state.global_step)
        sys.exit(128 + stop.caught)
    _save(trainer, tokenizer, folder)
    logger.info("done: %s", folder)


def evaluate(config: Config) -> dict[str, float]:
    """Loss and metrics of a config's model on its evaluation data."""
    trainer, _ = build(config)
    if trainer.eval_dataset is None:
        raise UserError("there is nothing to evaluate on. Set 'val_set_size' or 'test_datasets'.")
    return trainer.evaluate()


def build(config: Config) -> tuple[MethodTrainer, PreTrainedTokenizerBase]:
    """Everything a run needs, put together."""
    if config.method.online:
        raise UserError(f"rl: {config.method.name} trains on its own samples, which `train` cannot produce yet.")
    ranks, device = join_ranks(config.sharding.timeout)
    set_seed(config.optim.seed)
    tokenizer = load_tokenizer(config.model)
    with ranks.main_process_first():
        data = prepare(config, tokenizer)
    if not len(data.train):
        raise UserError("\n".join(["datasets: no row is left to train on.", *data.report.lines()]))

    dtype = compute_dtype(config.model, device)
    model = _model(config, tokenizer, dtype)
    batch = (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1) * ranks.num_processes
    arguments = training_arguments(
        config, steps_per_epoch=math.ceil(len(data.train) / batch), use_cpu=device.type == "cpu"
    )
    trainer = MethodTrainer(
        model,
        arguments,
        shuffle=not config.data.curriculum,
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        callbacks=_callbacks(config),
        **trainer_parts(
            model,
            config.method,
            dtype,
            device,
            longest=config.data.sequence_len,
            budget=config.optim.token_budget,
            checkpointing=config.optim.checkpointing_args if config.optim.gradient_checkpointing else None,
            pure=config.model.pure_bf16,
            separate_reference=partial(_separate_reference, config, tokenizer, dtype)
            if config.adapter.separate_reference
            else None,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, tokenizer


def _model(config: Config, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel | PeftModel:
    """The policy: loaded, dropout as the method wants it, adapted."""
    model = load_model(
        config.model,
        dtype,
        head=config.method.head,
        tokenizer=tokenizer,
        adapter=config.adapter,
        seed=config.optim.seed,
    )
    keeps_dropout = config.method.name in ("sft", "orm", "prm")
    if config.model.disable_dropout or (config.model.disable_dropout is None and not keeps_dropout):
        disable_dropout(model)
    return attach_adapter(model, config.adapter) if config.adapter.kind else model


def _separate_reference(config: Config, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    return load_model(config.model, dtype, tokenizer=tokenizer, seed=config.optim.seed)


def _callbacks(config: Config) -> list[TrainerCallback]:
    callbacks = [MetricsFile(Path(config.run.output_dir)), MarkWhole(), StopOnNan(), StopOnSignal(), Progress()]
    if config.run.patience:
        callbacks.append(EarlyStoppingCallback(config.run.patience))
    return callbacks


def _checkpoint(config: Config, folder: Path, resume: bool) -> Path | None:
    """The checkpoint to continue from, if that is what the user wants."""
    if config.run.resume_from is not None:
        return named_checkpoint(config.run.resume_from)
    found = last_whole_checkpoint(folder) if resume or config.run.auto_resume else None
    if resume and found is None:
        logger.warning("warning: %s has no whole checkpoint; starting anew", folder)
    return found


def _save(trainer: MethodTrainer, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The trained model or adapter at the top of the run folder."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_world_process_zero():
        save_model(model, folder, trainer.runner.dtype, tokenizer)
    trainer.accelerator.wait_for_everyone()
