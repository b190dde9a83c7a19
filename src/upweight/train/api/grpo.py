"""The GRPO and RLOO trainers for Python scripts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from datasets import Dataset
from peft import PeftConfig
from transformers import TrainingArguments

from upweight.errors import UserError
from upweight.log import counted
from upweight.methods.formulas.advantages import weighted_reward
from upweight.rollout.completion_source import SingleTurn
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.rollout.rollout import Rollout, readable
from upweight.sampler.in_process import InProcess
from upweight.train.api.as_config import build_config
from upweight.train.api.grpo_config import GRPOConfig, RLOOConfig, RolloutArguments
from upweight.train.api.inputs import (
    NO_PROMPT,
    ScriptDataset,
    convert_arguments,
    init_arguments,
    parts_for,
    require_type,
)
from upweight.train.api.trainers import Callbacks, EvalRows, Optimizers, Tokenizer
from upweight.train.objects import Model
from upweight.train.online.assemble import build_plan
from upweight.train.recording.completions import ShownCompletions
from upweight.train.trainer import MethodTrainer

GivenReward = Any  # a function, a callable object, a name, a reward model, or (model, tokenizer)
ROLLOUT_COLUMNS = ("prompt", "completion", "rewards", "finished", "reward")


class GRPOTrainer(MethodTrainer):
    """Trains a policy on completions that reward functions score."""

    config_class: ClassVar[type[RolloutArguments]] = GRPOConfig

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self,
        model: str | Model,
        reward_funcs: GivenReward | list[GivenReward] | None = None,
        args: RolloutArguments | TrainingArguments | None = None,
        train_dataset: ScriptDataset | None = None,
        eval_dataset: EvalRows = None,
        processing_class: Tokenizer = None,
        reward_processing_classes: Any = None,
        callbacks: Callbacks = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        tools: Any = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
        **unknown: Any,
    ) -> None:
        require_type("tools", tools, list | tuple, "a list of functions")
        require_type("environment_factory", environment_factory, Callable | Mapping, "a class, or a dict of them")
        if environment_factory is not None and train_dataset is None:
            train_dataset = _empty_rows(convert_arguments(args, self.config_class), environment_factory)
        inputs = init_arguments(locals())
        inputs["reward_tokenizers"] = inputs.pop("reward_processing_classes", None)
        super().__init__(parts_for(self.config_class, **inputs))
        assert self.rollouts is not None
        rewards = self.rollouts.producer.scorer.rewards
        self.reward_funcs = [reward.function for reward in rewards]
        self.reward_func_names = [reward.name for reward in rewards]
        self.reward_processing_classes = [getattr(function, "tokenizer", None) for function in self.reward_funcs]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint if one is passed; reward processes end with the training."""
        self._reset_rollouts()
        try:
            return super().train(*args, **kwargs)
        finally:
            self._reset_rollouts()

    def generate_completions(
        self, rows: ScriptDataset | Mapping[str, Any], num_generations: int | None = None
    ) -> list[dict[str, Any]]:
        """Sample and print completions for some rows with their rewards; nothing is trained.

        `rows` is a Dataset, a slice of one (`dataset[:2]`), a list of rows, or one row. Each completion is a dict with
        `prompt`, `completion`, `rewards` by their names, and `reward`, their weighted sum.
        """
        assert self.rollouts is not None
        assert self.encode is not None
        producer = self.rollouts.producer
        prepared = self.encode(_as_rows(rows), "rows")
        self.rollouts.sync(self.state.global_step)
        with self.rollouts.schedule.gathered_weights():
            groups = producer.evaluate(prepared, num_generations or self.rollouts.eval_size, self.state)
        rollout, names = Rollout(producer.num_rollouts, self.state.global_step, groups), producer.scorer.names
        online, totals = self.method.online_settings, []
        for group in groups:
            assert group.rewards_SR is not None
            totals += weighted_reward(group.rewards_SR, online.reward_weights if online else None).tolist()
        completions = list(readable(rollout, names, producer.decode))
        if self.is_world_process_zero():
            ShownCompletions(1, len(completions), names, producer.decode)(rollout, self.state.global_step)
        for row, total in zip(completions, totals, strict=True):
            row["reward"] = total
        return Completions({name: row[name] for name in ROLLOUT_COLUMNS} for row in completions)

    def _reset_rollouts(self) -> None:
        """Reset the rollouts before and after a training: processes, buffers, the sampler and the current rollout."""
        rollouts = self.rollouts
        assert rollouts is not None
        producer, sampler = rollouts.producer, rollouts.generator
        rollouts.close()
        rollouts.current, rollouts.units = None, []
        producer.scorer = producer.scorer.renewed()
        if isinstance(sampler, InProcess):  # device and dtype of the weights change when a training starts or ends
            engine = self.runner.engine
            options = {"engine": engine, "compile": sampler.compile, "records": engine.replay is not None}
            options["int8"] = sampler.int8
            device = self.accelerator.device if self.sharding != "none" else None
            rollouts.generator = InProcess(self.model, self.processing_class, device=device, **options)
            producer.check_sampling, producer.compiles = rollouts.generator.check_sampling, rollouts.generator
            if isinstance(producer.completion_source, SingleTurn | EpisodeRunner):
                producer.completion_source.generator = rollouts.generator


class Completions(list[dict[str, Any]]):
    """Completions with their rewards; a notebook cell that ends with them shows their number below what was printed."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"{counted(len(self), 'completion')}, each with {', '.join(ROLLOUT_COLUMNS)}")


class RLOOTrainer(GRPOTrainer):
    """REINFORCE with a leave-one-out baseline over the completions of a prompt; the KL is part of the reward."""

    config_class: ClassVar[type[RolloutArguments]] = RLOOConfig


def _empty_rows(args: RolloutArguments, factory: Any) -> list[dict[str, Any]]:
    """Return the rows of one rollout, for an environment that has all data itself."""
    if isinstance(factory, Mapping):
        raise UserError("train_dataset: several environments need rows, with a column 'environment' that names one.")
    if (args.max_steps or 0) <= 0:
        raise UserError("max_steps: without train_dataset there is no epoch to count; set how many steps to train.")
    return [{"prompt": NO_PROMPT}] * build_plan(build_config(args), args.world_size).groups


def _as_rows(rows: Any) -> Any:
    """Return rows as a list or a Dataset, also from one row or a mapping of columns."""
    if not isinstance(rows, Mapping):
        return rows
    prompt = rows.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)):
        return [rows]
    return Dataset.from_dict(dict(rows))
