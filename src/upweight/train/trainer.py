"""The loop: transformers' Trainer, with a step that counts exactly."""

import time
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from upweight.engine import Engine
from upweight.errors import UserError
from upweight.log import logger
from upweight.methods.base import Method
from upweight.models.precision import ComputeCopies
from upweight.models.reference import Reference
from upweight.train.loader import StepSampler, step_loader
from upweight.train.meters import Meters
from upweight.train.step import StepRunner

SMALLEST_BUDGET = 256


class MethodTrainer(Trainer):
    """Trains any offline method. The Trainer sees one batch a step; `StepRunner` cuts it into forwards."""

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        method: Method,
        engine: Engine,
        *,
        token_budget: int,
        dtype: torch.dtype = torch.float32,
        reference: Reference | None = None,
        copies: ComputeCopies | None = None,
        shuffle: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model=model, args=args, **options)
        # before transformers 5.19 this is what keeps the Trainer from dividing the loss again
        self.model_accepts_loss_kwargs = True
        self.method, self.copies, self.shuffle = method, copies, shuffle
        self.runner = StepRunner(method, engine, self.accelerator, token_budget, reference, dtype)
        self.last_log = time.perf_counter()
        self.add_callback(_EpochOrder(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Whole steps; not prepared by accelerate, whose loader would split them and run one ahead."""
        assert isinstance(self.train_dataset, Dataset)
        batch = self.args.per_device_train_batch_size * self.accelerator.num_processes
        self.sampler = StepSampler(
            len(self.train_dataset),
            batch,
            self.args.seed,
            shuffle=self.shuffle,
            drop_last=self.args.dataloader_drop_last,
        )
        return self._loader(self.train_dataset, self.sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Whole steps of the evaluation rows, in order."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        assert isinstance(rows, Dataset)
        batch = self.args.per_device_eval_batch_size * self.accelerator.num_processes
        return self._loader(rows, StepSampler(len(rows), batch, 0, shuffle=False))

    def _loader(self, rows: Dataset, sampler: StepSampler) -> DataLoader[Any]:
        workers = self.args.dataloader_num_workers
        ahead = self.args.dataloader_prefetch_factor if workers else None
        return step_loader(rows, self.method, sampler, num_workers=workers, prefetch_factor=ahead)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The stock optimizer; the compute copies of the weights follow its steps."""
        known = self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.copies is not None and optimizer is not known:
            self.copies.follow(optimizer)
        return optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Gradients of this rank's share of a step."""
        model.train()
        if callable(set_mode := getattr(self.optimizer, "train", None)):
            set_mode()
        try:
            return self.runner.train(model, inputs["units"])
        except torch.cuda.OutOfMemoryError as error:
            if self.accelerator.num_processes > 1 or self.runner.token_budget <= SMALLEST_BUDGET:
                raise UserError(_out_of_memory(self.runner.token_budget)) from error
        # Nothing of the failed try is kept, so the second one is exact.
        model.zero_grad()
        torch.cuda.empty_cache()
        self.runner.token_budget //= 2
        logger.warning("out of GPU memory: token_budget is now %d; trying the step again", self.runner.token_budget)
        try:
            return self.runner.train(model, inputs["units"])
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(_out_of_memory(self.runner.token_budget)) from error

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics of the evaluation rows, counted as exactly as in training."""
        model = self.model_wrapped
        assert isinstance(model, nn.Module)
        model.eval()
        training, self.runner.meters = self.runner.meters, Meters()
        tokens = self.runner.tokens
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for inputs in self.get_eval_dataloader(eval_dataset):
            loss, units = self.runner.evaluate(model, inputs["units"])
            sums = {unit: sums.get(unit, 0.0) + total for unit, total in loss.sums.items()}
            counts = {unit: counts.get(unit, 0.0) + count for unit, count in units.items()}
        total = sum(float(sums[unit] / counts[unit].clamp(min=1)) for unit in sums)
        metrics = {"loss": total, **self.runner.meters.drain(self.accelerator)}
        self.runner.meters, self.runner.tokens = training, tokens
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what was metered since the last log to a training log."""
        if "loss" in logs:
            logs |= self.runner.meters.drain(self.accelerator)
            now = time.perf_counter()
            tokens = self.accelerator.reduce(torch.tensor(self.runner.tokens, device=self.accelerator.device), "sum")
            assert isinstance(tokens, Tensor)
            logs["tokens_per_second"] = round(float(tokens) / (now - self.last_log), 1)
            self.last_log, self.runner.tokens = now, 0
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the stock estimate assumes padded rows."""
        return 0


class _EpochOrder(TrainerCallback):
    """Tells the sampler which epoch begins, also after a resume in its midst."""

    def __init__(self, trainer: MethodTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.sampler.epoch = int(state.epoch or 0)


def _out_of_memory(budget: int) -> str:
    """The ladder of remedies, cheapest first."""
    return (
        f"out of GPU memory in a training step with token_budget {budget}. In this order: "
        f"set 'token_budget: {budget // 2}'; 'gradient_checkpointing: true'; a shorter 'sequence_len'; "
        "'adapter: lora'; 'load_in_4bit: true' with 'adapter: qlora'; FSDP or DeepSpeed over more GPUs."
    )
