"""GRPO for Python scripts: a model, reward functions and prompts in, a policy that earns more out."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from peft import PeftConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from upweight.errors import UserError
from upweight.methods.formulas.advantages import weighted_reward
from upweight.models.load import compute_dtype
from upweight.rewards.load import as_rewards
from upweight.rewards.model import ModelOptions
from upweight.rewards.reward import Reward
from upweight.rewards.scorer import Scorer
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.rollout.rollout import Rollout, readable
from upweight.rollout.single_turn import SingleTurn
from upweight.sampler.in_process import InProcess
from upweight.train.api.grpo_config import GRPOConfig, RLOOConfig, RolloutArguments
from upweight.train.api.policy import Model, model_section
from upweight.train.api.rows import as_dataset
from upweight.train.api.trainers import GivenRows, config_of, parts_for, require_kind
from upweight.train.online.assemble import Policy, RolloutSpec, make_rollouts, watch_rollouts
from upweight.train.online.completions import ShownCompletions
from upweight.train.online.environments import EnvironmentSetup, bounds_of, check_rewards, python_environment
from upweight.train.online.feed import STATE, RolloutFeed
from upweight.train.trainer import MethodTrainer

GivenReward = Any  # a function, a callable object, a name, a reward model, or (model, tokenizer)


class GRPOTrainer(MethodTrainer):
    """A policy gradient on completions of prompts, by what reward functions say of them."""

    config_class: ClassVar[type[RolloutArguments]] = GRPOConfig

    def __init__(  # noqa: PLR0917 - the order that scripts know
        self,
        model: str | Model,
        reward_funcs: GivenReward | list[GivenReward] | None = None,
        args: RolloutArguments | None = None,
        train_dataset: GivenRows | None = None,
        eval_dataset: GivenRows | Mapping[str, GivenRows] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        peft_config: PeftConfig | None = None,
        tools: Any = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
        **inputs: Any,
    ) -> None:
        args = config_of(args, self.config_class)
        require_kind("tools", tools, list | tuple, "a list of functions")
        require_kind("environment_factory", environment_factory, Callable | Mapping, "a class, or a dict of them")
        acting = _acting(args, tools, environment_factory)
        if acting is not None and rollout_func is not None:
            raise UserError("rollout_func: cannot be used with 'tools' or 'environment_factory'. Keep one.")
        rows = as_dataset(train_dataset, "train_dataset")
        rewards = _rewards(reward_funcs, reward_processing_classes, args, rows.column_names, acting)
        parts = parts_for(
            model,
            args,
            train_dataset=rows,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks,
            optimizers=optimizers,
            **inputs,
        )
        folder = Path(args.output_dir or ".")
        policy = Policy.of(parts["model"], parts["processing_class"], parts, sharded=args.sharded)
        recipe = RolloutSpec(
            parts["train_dataset"],
            rewards,
            args.plan(),
            args.rollout(),
            folder,
            args.seed,
            shuffle=args.shuffle_dataset and parts["shuffle"],
            acting=acting,
            rollout_func=rollout_func,
        )
        super().__init__(rollouts=make_rollouts(policy, recipe), **parts)
        self.reward_funcs = [reward.function for reward in rewards]
        self.reward_func_names = [reward.name for reward in rewards]
        self.reward_processing_classes = [getattr(function, "tokenizer", None) for function in self.reward_funcs]
        self.add_callback(watch_rollouts(self, args.rollout(), folder, writes=args.log_completions))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint if one is given; processes that compute rewards end with it."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir))
            if resume_from_checkpoint is None:
                raise UserError(f"resume_from_checkpoint: {self.args.output_dir} has no checkpoint.")
        rollouts = self._renewed_rollouts()
        if resume_from_checkpoint:
            folder = Path(resume_from_checkpoint)
            if not (folder / STATE).is_file():
                raise UserError(f"resume_from_checkpoint: {folder} has no {STATE}: no run of this trainer wrote it.")
            rollouts.restore(folder)
        try:
            return super().train(resume_from_checkpoint or None, *args, **kwargs)
        finally:
            self._renewed_rollouts()

    def generate_completions(
        self, rows: GivenRows | Mapping[str, Any], num_generations: int | None = None
    ) -> list[dict[str, Any]]:
        """What the policy writes for some rows, shown with what rewards say of it; nothing is trained.

        `rows` is a Dataset, a slice of one (`dataset[:2]`), a list of rows, or one row. Each completion is a dict with
        `prompt`, `completion`, `rewards` by their names, and `reward`, their weighted sum.
        """
        assert self.rollouts is not None
        assert self.encode is not None
        producer = self.rollouts.producer
        prepared = self.encode(_as_rows(rows), "rows")
        self.rollouts.sync(self.state.global_step)
        with self.rollouts.whole():
            groups = producer.evaluate(prepared, num_generations or self.rollouts.eval_size, self.state)
        rollout, names = Rollout(producer.rollouts, self.state.global_step, groups), producer.scorer.names
        policy = self.method.policy_settings
        weights = policy and policy.reward_weights
        totals = [total for group in groups for total in weighted_reward(_scored(group.rewards_SR), weights).tolist()]
        found = list(readable(rollout, names, producer.decode))
        if self.is_world_process_zero():
            ShownCompletions(1, len(found), names, producer.decode)(rollout, self.state.global_step)
        kept = ("prompt", "completion", "rewards", "finished")
        return [
            {**{name: row[name] for name in kept}, "reward": total} for row, total in zip(found, totals, strict=True)
        ]

    def _renewed_rollouts(self) -> RolloutFeed:
        """The rollouts without what belongs to a training: its processes, its buffers, a rollout half trained on.

        Weights are read where they lie and as they are stored, and both change when a training begins or ends.
        """
        rollouts = self.rollouts
        assert rollouts is not None
        producer, old = rollouts.producer, rollouts.producer.scorer
        rollouts.close()
        rollouts.current, rollouts.units = None, []
        producer.scorer = Scorer(old.rewards, workers=old.num_workers, timeout=old.timeout)
        if isinstance(rollouts.generator, InProcess):
            model: Any = self.model
            args = self.args
            assert isinstance(args, RolloutArguments)
            device = self.accelerator.device if args.fsdp else None
            rollouts.generator = InProcess(
                model, self.processing_class, engine=self.runner.engine, device=device, compile=args.compile_sampler
            )
            producer.prove = rollouts.generator.prove
            if isinstance(producer.completion_source, SingleTurn | EpisodeRunner):
                producer.completion_source.generator = rollouts.generator
        return rollouts


class RLOOTrainer(GRPOTrainer):
    """REINFORCE on whole completions, each compared with the others of its prompt; the KL is in the reward."""

    config_class: ClassVar[type[RolloutArguments]] = RLOOConfig


def _acting(args: RolloutArguments, tools: Any, factory: Any) -> EnvironmentSetup | None:
    """What a script's policy acts in."""
    if not tools and factory is None:
        return None
    section = args.environment()
    environment = python_environment(section, factory, list(tools or ()), "environment_factory")
    return EnvironmentSetup(environment, bounds_of(section), template_args=args.chat_template_kwargs or {})


def _rewards(
    given: Any, tokenizers: Any, args: RolloutArguments, columns: Sequence[str], acting: EnvironmentSetup | None
) -> list[Reward]:
    """The rewards that a script gives and its environment's own, able to read the data's columns."""
    rewards = as_rewards(
        given,
        tokenizers,
        environment=() if acting is None else acting.environment.reward_names,
        models=ModelOptions(compute_dtype(model_section(None, args), args.device), args.device, args.trust_remote_code),
    )
    if not rewards:
        raise UserError("reward_funcs: empty. A group of completions is compared by rewards: give at least one.")
    weights = args.reward_weights
    if weights is not None and len(weights) != len(rewards):
        raise UserError(f"reward_weights: {len(weights)} weights for {len(rewards)} rewards. Give one for each.")
    check_rewards(rewards, columns, acting)
    return rewards


def _as_rows(given: Any) -> Any:
    """Rows as a list or a Dataset, from those or from one row or a mapping of columns."""
    if not isinstance(given, Mapping):
        return given
    prompt = given.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)):
        return [given]
    return Dataset.from_dict(dict(given))


def _scored(rewards_SR: Any) -> Any:
    assert rewards_SR is not None, "a group came back without rewards"
    return rewards_SR
