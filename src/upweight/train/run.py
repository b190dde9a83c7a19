"""A run from its config to its result, in reading order."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from peft import PeftModel
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    set_seed,
)

from upweight.config import Config
from upweight.config.zero import partitions_weights
from upweight.data.prepare import Prepared, prepare
from upweight.engine.context import Context, require_shareable
from upweight.errors import UserError
from upweight.log import is_seen, logger
from upweight.methods import feature_matcher
from upweight.methods.base import Method
from upweight.models.adapters.attach import attach_adapter
from upweight.models.load import compute_dtype, disable_dropout, load_config, load_model, master_dtype
from upweight.models.precision import Sharding
from upweight.models.tokenizer import load_tokenizer
from upweight.rollout.ebft.strided_blocks import with_blocks
from upweight.runs.record import about, recorded, refuse_busy
from upweight.train.arguments import training_arguments
from upweight.train.assemble import trainer_parts
from upweight.train.callbacks import HealthCallback, LossLimit, Progress, StopOnNan, StopOnSignal
from upweight.train.checkpoints import (
    KeepCheckpoints,
    SaveFirstStep,
    last_whole_checkpoint,
    named_checkpoint,
    set_aside,
    step_of,
)
from upweight.train.distributed.deepspeed import fit_to_ranks, partitioned_at_once, zero_config
from upweight.train.distributed.fsdp import layout_of, read_once, refuse_other_layout, shard_alone, sharding_of
from upweight.train.distributed.ranks import (
    broadcast_from_rank0,
    init_single_rank,
    join_ranks,
    rank0_first,
    share_rows,
)
from upweight.train.loader import StepSampler
from upweight.train.lr_groups import lr_rules
from upweight.train.machine_checks import require_machine
from upweight.train.model_card import model_card
from upweight.train.online.assemble import Policy, plan_of, rewards_of, rollouts_of, watch_rollouts
from upweight.train.online.before_after import BeforeAndAfter
from upweight.train.online.completions import cut_completions
from upweight.train.online.environments import environment_setup
from upweight.train.profile import Profiler
from upweight.train.reference.synced import SyncReference
from upweight.train.run_folder import MetricsFile, changed_keys, cut_metrics, refuse_other_weights, write_config
from upweight.train.trackers import set_variables
from upweight.train.trainer import MethodTrainer, out_of_memory


def train(config: Config, *, resume: bool = False, watchers: Sequence[TrainerCallback] = ()) -> None:
    """Train what a config describes and write the run folder; `watchers` look on."""
    folder, stop = Path(config.run.output_dir), StopOnSignal()
    refuse_busy(folder)
    trainer = build(config, resume=resume, trains=True)
    for callback in (*_callbacks(config, trainer, stop), *watchers):
        trainer.add_callback(callback)
    checkpoint = broadcast_from_rank0(_begin(config, folder, resume) if trainer.is_world_process_zero() else None)
    if checkpoint is not None:
        refuse_other_layout(checkpoint, sharding_of(config.sharding, PartialState().num_processes))
        if layout_of(checkpoint) == "deepspeed":
            fit_to_ranks(checkpoint, trainer)
        trainer.args.eval_on_start = False
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, SyncReference):
                callback.restore(checkpoint)
        if trainer.rollouts is not None:
            trainer.rollouts.restore(checkpoint)
    with recorded(folder, about(trainer), writes=trainer.is_world_process_zero()):
        _train_and_save(config, trainer, stop, checkpoint)
    logger.info("done: %s", folder)
    PartialState().destroy_process_group()


def _train_and_save(config: Config, trainer: MethodTrainer, stop: StopOnSignal, checkpoint: Path | None) -> None:
    """The loop, from a checkpoint or the beginning, and the model that comes of it."""
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(out_of_memory("while training", trainer.runner.token_budget)) from error
    finally:
        stop.restore()
        if trainer.rollouts is not None:
            trainer.rollouts.close()
    if stop.caught and trainer.state.global_step < trainer.state.max_steps:
        logger.warning("stopped at step %d; continue with --resume", trainer.state.global_step)
        sys.exit(128 + stop.caught)
    trainer.card = lambda: model_card(config, trainer.state.log_history, len(trainer.train_dataset))
    trainer.save_model()
    trainer.create_model_card()


def evaluate(config: Config) -> dict[str, float]:
    """Loss and metrics of a config's model on its evaluation data."""
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
    """Everything that computes, put together; what watches a run is added to it for training.

    Only what is trained next may be loaded in the pieces that ranks will hold of it.
    """
    require_machine(config, trains=trains)
    set_variables(config.tracking)
    if config.sharding.deepspeed is not None or (config.sharding.fsdp and _resumes_shards(config, resume)):
        init_single_rank()
    ranks, device = join_ranks(config.sharding.timeout)
    context = _context(config)
    set_seed(config.optim.seed)
    tokenizer = load_tokenizer(config.model)
    data = _data(config, tokenizer, says=ranks.is_main_process)
    acting = environment_setup(config)
    rewards = rewards_of(config, device, list(data.train[0]), acting) if config.method.online else []
    dtype, sharding = compute_dtype(config.model, device), sharding_of(config.sharding, ranks.num_processes)
    model = _model(config, tokenizer, dtype, sharding, trains)
    arguments = training_arguments(
        config,
        steps_per_epoch=_steps_per_epoch(config, len(data.train), ranks.num_processes),
        use_cpu=device.type == "cpu",
        dtype=dtype,
        sharding=sharding,
    )
    load_reference = partial(load_model, config.model, dtype, tokenizer=tokenizer, seed=config.optim.seed)
    parts = trainer_parts(
        model,
        config.method,
        dtype,
        device,
        longest=max(config.data.sequence_len, config.data.eval_sequence_len or 0),
        layout=config.model.layout,
        budget=config.optim.token_budget,
        optimizer=config.optim.optimizer,
        checkpointing=config.optim.checkpointing_args if config.optim.gradient_checkpointing else None,
        pure=config.model.pure_bf16,
        separate_reference=load_reference if config.adapter.separate_reference else None,
        prepared=data.folder,
        sharding=sharding,
        noise=config.optim.neftune_alpha,
        offload=config.optim.activation_offloading,
        offload_reference=config.optim.reference_offloading,
        context=context,
    )
    offload = config.optim.reference_offloading
    policy = Policy.of(model, tokenizer, parts, offload_reference=offload, sharded=sharding != "none")
    trainer = MethodTrainer(
        model,
        arguments,
        shuffle=not config.data.curriculum,
        rate_of=lr_rules(config.optim, config.adapter, model),
        train_dataset=data.train,
        eval_dataset=data.evaluation,
        processing_class=tokenizer,
        rollouts=rollouts_of(config, policy, data.train, rewards, acting) if config.method.online else None,
        **parts,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _data(config: Config, tokenizer: PreTrainedTokenizerBase, *, says: bool) -> Prepared:
    """The rows of a run, with the chat template they were written by in the tokenizer."""
    data = rank0_first(partial(prepare, config, tokenizer))
    if not len(data.train):
        raise UserError("\n".join(["datasets: no row is left to train on.", *data.report.lines()]))
    if says:
        _say_what_became_of_rows(data)
    if data.template is not None:
        tokenizer.chat_template = data.template  # saved with the model, which knows no other
    return _with_room_for_blocks(data, config.method)


def _context(config: Config) -> Context | None:
    """The ranks that share this rank's rows, if any, where the model's heads can be shared."""
    context = share_rows(config.sharding.context_parallel_size)
    if context is not None:
        require_shareable(load_config(config.model), context.size)
    return context


def _with_room_for_blocks(data: Prepared, method: Method) -> Prepared:
    """The data without documents that no block fits into, for a method that samples blocks."""
    if not method.strided or (matching := feature_matcher(method)) is None:
        return data
    held = data.evaluation
    return dataclasses.replace(
        data,
        train=with_blocks(data.train, matching, "training"),
        evaluation=None if held is None else with_blocks(held, matching, "evaluation"),
    )


def _say_what_became_of_rows(data: Prepared) -> None:
    """Say which entries lost rows or had rows cut: a run on less than its data must not look like one on all of it."""
    for part, line in zip(data.report.parts, data.report.lines(), strict=False):  # its first lines are the parts
        if part.dropped or part.notes:
            logger.warning("%s", line)


def _steps_per_epoch(config: Config, rows: int, ranks: int) -> int:
    """Optimizer steps in which every row comes up once."""
    ranks //= config.sharding.context_parallel_size
    if config.method.online:
        return plan_of(config, ranks).steps_per_epoch(rows)
    batch = (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1) * ranks
    return max(len(StepSampler(rows, batch, 0, shuffle=False, drop_last=config.data.drop_last)), 1)


def _model(
    config: Config, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, sharding: Sharding, trains: bool
) -> PreTrainedModel | PeftModel:
    """The policy: loaded, dropout as the method wants it, adapted or partly frozen."""
    sparing, zero = config.sharding.low_memory_loading, config.sharding.deepspeed
    cut = zero_config(zero, config.folder, dtype) if zero and partitions_weights(zero, config.folder) else None
    compared = config.method.online and config.rollout.use_vllm  # rank 0 compares whole weights with a server's
    in_pieces = cut if sparing and trains and not compared else None
    masters = trains and config.adapter.kind is None and not config.model.pure_bf16 and sharding != "deepspeed"
    with read_once(sparing and sharding == "fsdp"), partitioned_at_once(in_pieces):
        model = load_model(
            config.model,
            master_dtype(config.model, dtype) if masters else dtype,
            head=config.method.head,
            tokenizer=tokenizer,
            adapter=config.adapter,
            seed=config.optim.seed,
        )
    if config.model.disable_dropout or (config.model.disable_dropout is None and not config.method.keeps_dropout):
        disable_dropout(model)
    if config.optim.unfrozen is not None:
        freeze_all_but(model, config.optim.unfrozen)
    if config.adapter.kind is None:
        return model
    return attach_adapter(model, config.adapter, new_tokens=len(config.model.new_tokens))


def freeze_all_but(model: nn.Module, patterns: list[str]) -> None:
    """Train only the parameters whose names match one of the patterns from their beginning."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            raise UserError(f"unfrozen_parameters: '{pattern}' matches no weight; names look like {names[0]}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))


def _callbacks(config: Config, trainer: MethodTrainer, stop: StopOnSignal) -> list[TrainerCallback]:
    """What watches a run. The order counts: a save is asked for, then logged, then completed, then marked."""
    run, folder = config.run, Path(config.run.output_dir)
    callbacks: list[TrainerCallback] = [stop, *([SaveFirstStep()] if run.save_first_step else [])]
    callbacks += [MetricsFile(folder), Progress(bar=is_seen()), HealthCallback(folder), StopOnNan(trainer.rows_of_step)]
    if run.loss_limit is not None:
        callbacks.append(LossLimit(run.loss_limit, run.loss_limit_patience))
    if run.patience is not None:
        callbacks.append(EarlyStoppingCallback(run.patience))
    if run.profiler_steps is not None:
        callbacks.append(Profiler(folder, run.profiler_steps, run.profiler_start))
    reference, synced = trainer.runner.reference, config.method.reference_sync
    if reference is not None and synced is not None:
        callbacks.append(SyncReference(reference, synced))
    if trainer.rollouts is not None:
        callbacks += [watch_rollouts(trainer, config.rollout, folder), BeforeAndAfter(folder)]
    return [*callbacks, KeepCheckpoints(run.save_total_limit)]


def _checkpoint(config: Config, resume: bool) -> Path | None:
    """Where a run goes on from."""
    if config.run.resume_from is not None:
        return named_checkpoint(config.run.resume_from)
    return last_whole_checkpoint(Path(config.run.output_dir)) if resume or config.run.auto_resume else None


def _resumes_shards(config: Config, resume: bool) -> bool:
    checkpoint = _checkpoint(config, resume)
    return checkpoint is not None and layout_of(checkpoint) == "fsdp"


def _begin(config: Config, folder: Path, resume: bool) -> Path | None:
    """Bring the run folder to where the run begins: at a checkpoint, or empty of what an earlier run left."""
    checkpoint = _checkpoint(config, resume)
    if resume and checkpoint is None:
        logger.warning("warning: %s has no whole checkpoint; starting anew", folder)
    step = (step_of(checkpoint) or 0) if checkpoint else 0
    changed = changed_keys(config, checkpoint.parent) if checkpoint else []
    refuse_other_weights(changed, checkpoint, config.optim.scheduler)
    if changed:
        logger.warning("warning: %s set otherwise than when the run began", ", ".join(changed))
    write_config(config, folder)
    cut_metrics(folder, step if checkpoint else -1)
    cut_completions(folder, step if checkpoint else -1)
    set_aside(folder, step)
    return checkpoint
