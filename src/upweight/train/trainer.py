"""The training loop: transformers' Trainer with losses divided by the counts of the whole step."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import speed_metrics

from upweight.data.cache import rows_digest
from upweight.data.stream.feed import RowFeed
from upweight.errors import UserError
from upweight.heartbeat import activity, heartbeat
from upweight.log import counted, logger
from upweight.models.export import quiet_saving, save_model
from upweight.models.hub import hub_errors
from upweight.models.memory import out_of_memory
from upweight.models.precision import Sharding
from upweight.models.processor import save_processor
from upweight.models.reference import SeparateModel
from upweight.rollout.custom import CustomRollout
from upweight.runs.checkpoints import WHOLE, checkpoint_to_resume, step_of
from upweight.runs.lock import lock_folder
from upweight.train.assemble import TrainerParts
from upweight.train.distributed.deepspeed import fit_to_ranks
from upweight.train.distributed.fsdp import refuse_other_layout, set_up_sharding
from upweight.train.distributed.ranks import all_gather_objects, broadcast_from_rank0
from upweight.train.loader import FeedLoader, StepBatchSampler, is_prepared, require_prepared, restore_feed, step_loader
from upweight.train.lr_groups import ConfiguredRates, split_by_lr
from upweight.train.online.feed import RolloutLoader
from upweight.train.recording.callbacks import EvaluationLeft
from upweight.train.recording.hub import pushing, write_card
from upweight.train.recording.metrics import loss_without_steps
from upweight.train.recording.run_folder import require_same_data
from upweight.train.reference import SyncReference, map_sets, with_first_reference, with_reference
from upweight.train.step import StepRunner
from upweight.train.user_code import UserCallback, refuse_unused_hooks
from upweight.user_modules import from_users_code, named_errors


class MethodTrainer(Trainer):
    """Trains any method. The Trainer sees one batch a step; `StepRunner` cuts it into forwards."""

    loss_is_scaled_for_ga = True
    model: nn.Module
    model_wrapped: nn.Module
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(self, parts: TrainerParts) -> None:
        policy, rollouts = parts.policy, parts.rollouts
        refuse_unused_hooks(type(self))
        Path(parts.arguments.output_dir or ".").mkdir(parents=True, exist_ok=True)
        super().__init__(
            model=policy.model,
            args=parts.arguments,
            train_dataset=parts.train_dataset,
            eval_dataset=parts.eval_dataset,
            processing_class=policy.tokenizer,
            callbacks=list(parts.callbacks),
            optimizers=parts.objects.optimizers,
            optimizer_cls_and_kwargs=parts.objects.optimizer_class or parts.user_code.optimizer,
        )
        set_up_sharding(self, policy.dtype)
        # before transformers 5.19 this is what keeps the Trainer from dividing the loss again
        self.model_accepts_loss_kwargs = True
        self.method, self.copies = policy.method, policy.copies
        self.sharding: Sharding = policy.sharding
        self.shuffle, self.lr_rule, self.encode = parts.shuffle, parts.lr_rule, parts.encode
        self.recording, self.rollouts, self.schedule = parts.recording, rollouts, parts.user_code.schedule
        rows: Any = parts.train_dataset
        self.feed: RowFeed | None = rows if isinstance(rows, RowFeed) else None
        self.data_digest = cache(rows.digest if isinstance(rows, RowFeed) else partial(rows_digest, rows))
        self.allow_changed_data = parts.allow_changed_data
        self.card: Callable[[], str] | None = None  # returns the text of the model card
        self.between_batches: Callable[[], None] = lambda: None  # of evaluations; may raise EvaluationLeft
        temperature = 1.0 if rollouts is None else rollouts.producer.sampling.temperature or 1.0  # greedy: taken at 1
        skips_zero_advantage = rollouts is not None and rollouts.section.skip_zero_advantage
        options = (
            policy.token_budget, policy.reference, policy.dtype, temperature, skips_zero_advantage, policy.teachers,
            policy.router_coefficient,
        )  # fmt: skip
        self.runner = StepRunner(policy.method, policy.engine, self.accelerator, *options)
        self.router_aux_loss_coef = policy.router_coefficient
        self.aux_loss_enabled = self.router_aux_loss_coef > 0  # both are read by scripts
        self.runner.sources = self.feed.names if self.feed is not None else ()
        if rollouts is not None and isinstance(rollouts.producer.completion_source, CustomRollout):
            rollouts.producer.completion_source.trainer = self
        self._set_rows(parts)
        if hasattr(policy.model, "add_model_tags"):
            policy.model.add_model_tags(["upweight", policy.method.name])
        self.last_log, self.last_blocked = time.perf_counter(), 0.0  # blocked by rollouts
        self.last_logged_step, self.resumed_at = 0, 0
        self.metrics_of_callbacks: list[Callable[[Any, Mapping[str, float]], Mapping[str, float]]] = []
        self.made_with = dict(vars(parts.arguments)), frozenset(vars(self))  # a script may change its arguments

    def _set_rows(self, parts: TrainerParts) -> None:
        """Set the prepared rows, with the reference's log-probs where asked, and the datasets that scripts see."""
        self.precompute = parts.policy.precompute
        if self.precompute is not None:
            self.train_dataset = with_reference(self.train_dataset, parts.policy.model, self.runner, self.precompute)
            if parts.encode is not None:  # the folder caches the training rows only
                self.precompute = replace(self.precompute, folder=None)
            self.eval_dataset = map_sets(self.eval_dataset, self._with_reference)
        self.train_rows, self.eval_rows = self.train_dataset, self.eval_dataset
        if self.rollouts is not None and parts.objects.from_script:  # prompts as they were given
            self.train_dataset, self.eval_dataset = parts.objects.train_dataset, parts.objects.eval_dataset
        self.given_eval = self.eval_dataset

    @property
    def ref_model(self) -> nn.Module | None:
        """Return the separate reference model, or None where the reference is the policy with other weights."""
        reference = self.runner.reference
        return reference.model if isinstance(reference, SeparateModel) else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's loop, from a checkpoint if one is passed (True: the last complete one)."""
        folder, writes = Path(self.args.output_dir or "."), self.is_world_process_zero()
        with ExitStack() as stack:
            if self.recording is not None:
                stack.enter_context(heartbeat())
                stack.enter_context(activity(f"training into {folder}"))
                stack.enter_context(lock_folder(folder) if writes else nullcontext())
            stack.callback(setattr, self, "is_in_train", False)  # also after an error, for evaluate()
            checkpoint = broadcast_from_rank0(checkpoint_to_resume(resume_from_checkpoint, folder) if writes else None)
            if self.feed is not None:
                stack.callback(self.feed.close)
                self.feed.restore(None)
            self.resumed_at = 0 if checkpoint is None else step_of(checkpoint) or 0
            if checkpoint is not None:
                self._restore_from(checkpoint)
            with nullcontext() if self.recording is None else self.recording(self, checkpoint):
                try:
                    trained = super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)
                    return trained._replace(training_loss=trained.metrics["train_loss"])  # as it was logged
                except torch.cuda.OutOfMemoryError as error:
                    raise UserError(out_of_memory("while training", self.runner.token_budget)) from error
                except Exception as error:  # of a script's callback: the frames of the loop say nothing about it
                    raise error.with_traceback(from_users_code(error.__traceback__))  # noqa: B904, it is the same

    def _restore_from(self, checkpoint: Path) -> None:
        """Restore the state that transformers does not: rollouts, a synced reference, shards of another world size."""
        refuse_other_layout(checkpoint, self.sharding)
        require_same_data(checkpoint, self.data_digest, allowed=self.allow_changed_data)
        if self.sharding == "deepspeed":
            fit_to_ranks(checkpoint, self)
        self.args.eval_on_start = False
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SyncReference):
                callback.restore(checkpoint)
        if self.rollouts is not None:
            self.rollouts.restore(checkpoint)
        elif self.feed is not None:
            restore_feed(self.feed, checkpoint)

    def get_train_dataloader(self) -> Any:
        """Return a loader of whole steps; accelerate does not prepare it, since it would split each step over ranks."""
        if self.rollouts is not None:
            return RolloutLoader(self, self.args.dataloader_num_workers)
        args, steps_done = self.args, lambda: self.state.global_step
        batch = args.per_device_train_batch_size * self.runner.packer.data_parallel_size
        if self.feed is not None:
            options = {"compare": not self.shuffle, "drop_last": args.dataloader_drop_last}
            self.feed_loader = FeedLoader(self.feed, self.method, batch, steps_done, **options)
            return self.feed_loader
        require_prepared(self.train_dataset, self.train_rows)
        rows, seed = len(self.train_dataset), args.seed if args.data_seed is None else args.data_seed
        self.sampler = StepBatchSampler(rows, batch, seed, self.shuffle, args.dataloader_drop_last, steps_done)
        if not len(self.sampler):
            remedy = "Lower 'micro_batch_size' or 'gradient_accumulation_steps', or drop 'dataloader_drop_last'."
            raise UserError(f"datasets: {counted(rows, 'row')} cannot fill one batch of {batch}. {remedy}")
        return self._loader(self.train_dataset, self.sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader of whole steps of the evaluation rows, in order."""
        rows = self._eval_rows(None) if eval_dataset is None else eval_dataset
        batch = self.args.per_device_eval_batch_size * self.runner.packer.data_parallel_size
        sampler = StepBatchSampler(len(rows), batch, 0, shuffle=False)
        if self.rollouts is not None:  # prompts, which evaluations hand to the sampler themselves
            workers = 0 if isinstance(self.eval_dataset, IterableDataset) else self.args.dataloader_num_workers
            return DataLoader(rows, batch_sampler=sampler, collate_fn=list, num_workers=workers)
        return self._loader(rows, sampler)

    def _loader(self, rows: Any, sampler: StepBatchSampler) -> DataLoader[Any]:
        workers = self.args.dataloader_num_workers
        ahead = self.args.dataloader_prefetch_factor if workers else None
        return step_loader(rows, self.method, sampler, num_workers=workers, prefetch_factor=ahead)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, split its groups by learning rate, and let the compute copies follow its steps."""
        before = self.optimizer
        with nullcontext() if self.optimizer_cls_and_kwargs is None else named_errors("optimizer: cannot be built"):
            optimizer = super().create_optimizer(*args, **kwargs)
        if optimizer is not before:
            if self.lr_rule is not None:
                split_by_lr(optimizer, self.model, self.lr_rule)
            self.add_callback(ConfiguredRates(optimizer))
            if self.copies is not None:
                self.copies.follow(optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the learning rate schedule, the user's where the config names one."""
        if self.lr_scheduler is None and self.schedule is not None:
            warmup = self.args.get_warmup_steps(num_training_steps)
            trained: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self.schedule(trained, num_training_steps, warmup)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the batch of a step; none after the last step, where a resumed Trainer would do one more."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Compute this rank's gradients of a step; when out of memory, give something up and try again."""
        model.train()
        self._optimizer_mode("train")
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        if self.rollouts is None or not self.rollouts.repeats:
            tokens = sum(len(sample.ids) for unit in inputs["units"] for sample in unit.samples)
            self.state.num_input_tokens_seen += tokens
        given_up: list[str] = []
        release = None if self.rollouts is None else self.rollouts.release_sampler
        while True:
            try:
                with activity("training on a step"):
                    return self.runner.train(model, inputs["units"], inputs.get("counts"), inputs.get("sources"))
            except torch.cuda.OutOfMemoryError as error:
                # Several ranks would have to fail together.
                alone = self.accelerator.num_processes == 1
                what = self.runner.give_up(model, inputs["units"], release) if alone else None
                if what is None:
                    message = out_of_memory("in a training step", self.runner.token_budget, given_up)
                    raise UserError(message) from error
            # Nothing of the failed try is kept, so the next one is exact.
            given_up.append(what)
            model.zero_grad()
            torch.cuda.empty_cache()
            logger.warning("out of GPU memory at step %d: giving up %s", self.state.global_step + 1, what)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return loss and metrics of the evaluation rows; metrics of several sets are prefixed by their names."""
        if (rows := self._eval_rows(eval_dataset)) is None:
            raise UserError("eval_dataset: there are no rows to evaluate. Give some to the trainer, or to evaluate().")
        named = {f"_{name}": part for name, part in rows.items()} if isinstance(rows, Mapping) else {"": rows}
        best = self.args.metric_for_best_model
        try:
            parts = [self._evaluate_set(part, f"{metric_key_prefix}{name}") for name, part in named.items()]
        except EvaluationLeft:
            return {} if best is None else {f"eval_{best.removeprefix('eval_')}": math.nan}  # never better
        metrics = {name: value for part in parts for name, value in part.items()}
        if self.is_in_train and best is not None and f"eval_{best.removeprefix('eval_')}" not in metrics:
            has = ", ".join(name.removeprefix("eval_") for name in metrics)
            raise UserError(f"metric_for_best_model: evaluations have no '{best}'. They have {has}.")
        return metrics

    def _eval_rows(self, passed: Any) -> Any:
        """Return prepared evaluation rows: of those passed, or of `eval_dataset`, which a script may have replaced."""
        is_ready = self.rollouts is None and is_prepared(self.eval_dataset, self.train_rows)
        if passed is None and (is_ready or self.eval_dataset is self.given_eval):
            return self.eval_dataset if self.rollouts is None else self.eval_rows
        raw, encode = self.eval_dataset if passed is None else passed, self.encode
        return raw if encode is None else map_sets(raw, lambda rows: self._with_reference(encode(rows)))

    def _evaluate_set(self, rows: Any, prefix: str) -> dict[str, float]:
        """Return and log the metrics of one evaluation set: loss, or online the rewards of completions."""
        model, online, began = self.model_wrapped, self.rollouts, time.time()
        model.eval()
        self._optimizer_mode("eval")
        if online is not None:
            with activity("evaluating"):
                metrics = online.evaluate(rows, self.state, self.runner, model, prefix, between=self.between_batches)
        else:
            sums: dict[str, Tensor] = {}
            counts: dict[str, Tensor] = {}
            with self.runner.other_meters() as meters:
                for inputs in self.get_eval_dataloader(rows):
                    self.between_batches()
                    with activity("evaluating"):
                        loss, added = self.runner.evaluate(model, inputs["units"])
                    sums = {name: sums.get(name, 0.0) + total for name, total in loss.sums.items()}
                    counts = {name: counts.get(name, 0.0) + count for name, count in added.items()}
            total = sum(float(sums[name] / counts[name].clamp(min=1)) for name in sums)
            metrics = {"loss": total, **meters.drain(self.accelerator)}
        named = {f"{prefix}_{name}": value for name, value in metrics.items()}
        batches = -(-len(rows) // (self.args.per_device_eval_batch_size * self.runner.packer.data_parallel_size))
        named |= speed_metrics(prefix, began, num_samples=len(rows), num_steps=batches)
        if online is None and self.state.num_input_tokens_seen:  # trained on so far: none where nothing was
            named[f"{prefix}_num_tokens"] = self.state.num_input_tokens_seen
        self.log(named)  # which adds the epoch
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _with_reference(self, rows: Any) -> Any:
        return with_first_reference(rows, self.model, self.runner, self.precompute, self.state.global_step)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the loop has no predictions to return."""
        raise UserError("predict: there are no predictions to return; evaluate(rows) gives losses and metrics.")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the metrics and the throughput since the last log."""
        if self.rollouts is not None:  # the Trainer does not know how much of an epoch was trained before a resume
            self.state.epoch = self.state.global_step / self.rollouts.steps_per_epoch
        elif self.feed is not None and self.is_in_train:
            steps = self.state.max_steps if self.feed.epoch_rows is None else len(self.feed_loader)
            self.state.epoch = self.state.global_step / steps
        logs |= loss_without_steps(logs, self.state, self.resumed_at)
        if "train_runtime" in logs or "loss" in logs:  # at the end, what was metered since has no other entry
            logs |= self.runner.meters.drain(self.accelerator)
        if "loss" in logs:
            now = time.perf_counter()
            seconds = now - self.last_log
            tokens = sum(all_gather_objects(self.runner.tokens))
            logs["tokens_per_second"] = round(tokens / seconds, 1)
            if self.rollouts is not None:  # the same without the time in which training waited for rollouts
                blocked = self.rollouts.ahead.blocked - self.last_blocked
                logs["training/tokens_per_second"] = round(tokens / max(seconds - blocked, 1e-9), 1)
                logs["rollout/share_of_seconds"] = round(blocked / seconds, 3)
                logs["step_time"] = seconds / max(self.state.global_step - self.last_logged_step, 1)
                self.last_blocked += blocked
            logs["num_tokens"] = self.state.num_input_tokens_seen
            self.last_logged_step = self.state.global_step
            self.last_log, self.runner.tokens = now, 0
        for metrics in self.metrics_of_callbacks:
            logs |= metrics(self.state, logs)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, UserCallback):
                logs |= callback.checked_metrics(self.state, logs)
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save float32 master weights to a checkpoint, and the model in the compute dtype to other folders."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if step_of(folder) is not None:
            if self.args.should_save:
                (folder / WHOLE).unlink(missing_ok=True)  # marked again once every file is written
                folder.mkdir(parents=True, exist_ok=True)  # the Trainer checks next that it exists
                save_processor(self.processing_class, str(folder))  # of which the Trainer saves the tokenizer alone
            with quiet_saving():
                super().save_model(output_dir, _internal_call)
            return
        self._optimizer_mode("eval")
        weights = None
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            weights = self.accelerator.get_state_dict(self.model_wrapped if self.is_deepspeed_enabled else self.model)
        if self.args.should_save:
            model: Any = self.accelerator.unwrap_model(self.model)
            save_model(model, folder, self.runner.dtype, self.processing_class, weights)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository on the hub."""
        with hub_errors("there is no repository to push to"):
            super().init_hf_repo(token)

    def push_to_hub(
        self, commit_message: str | None = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Push the model, which is saved before the hub is asked for anything."""
        with pushing(self):
            if self.hub_model_id is None:
                super().init_hf_repo(token)
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md to the run folder: the card of the run, else that of the Trainer, which takes TRL's names."""
        write_card(self, super().create_model_card, *args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the Trainer's estimate assumes padded rows."""
        return 0

    def _optimizer_mode(self, mode: str) -> None:
        """Switch a schedule-free optimizer to its weights for training or evaluation."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper has the methods of all
        if callable(set_mode := getattr(inner, mode, None)):
            set_mode()
            if self.copies is not None:
                self.copies.refresh()
