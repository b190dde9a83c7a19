"""Between a policy and its rollouts: what runs from a config and the Python API put together alike."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, TrainerCallback

from upweight.config import Config
from upweight.config.resolve import generation_batch
from upweight.config.rollout import RolloutSection
from upweight.data.transforms import load_function
from upweight.engine import Engine
from upweight.log import logger
from upweight.methods.base import Method
from upweight.models.load import compute_dtype
from upweight.rewards.load import load_rewards
from upweight.rewards.reward import Reward, check_columns
from upweight.rewards.scorer import Scorer
from upweight.rollout.custom import CustomRollout
from upweight.rollout.in_process import InProcess
from upweight.rollout.plan import Plan, PromptOrder
from upweight.rollout.producer import OWN_COLUMNS, Producer, Ranks, Rows
from upweight.rollout.sampled import SingleTurn
from upweight.rollout.settings import sampling_of
from upweight.train.completions import CompletionFiles, ShownCompletions
from upweight.train.ranks import from_all_ranks
from upweight.train.rollouts import KeepRollouts, Rollouts
from upweight.train.trainer import MethodTrainer


def plan_of(config: Config, ranks: int) -> Plan:
    """Sizes of a config's rollouts."""
    step = (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1) * ranks
    return Plan.fitting(generation_batch(config, ranks), config.method.group_size, step, config.rollout.num_iterations)


def rewards_of(config: Config, device: torch.device, columns: Sequence[str]) -> list[Reward]:
    """The rewards that a config names, able to read the data's columns."""
    dtype = compute_dtype(config.model, device)
    rewards = load_rewards(config.rollout.reward_funcs, config.folder, dtype=dtype, device=device)
    check_columns(rewards, [name for name in columns if name not in OWN_COLUMNS])
    return rewards


def rollouts_of(
    config: Config,
    model: Any,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rows: Rows,
    rewards: Sequence[Reward],
) -> Rollouts:
    """The rollouts that a config describes."""
    path = config.rollout.rollout_func
    return make_rollouts(
        model,
        engine,
        tokenizer,
        config.method,
        rows=rows,
        plan=plan_of(config, PartialState().num_processes),
        section=config.rollout,
        rewards=rewards,
        seed=config.optim.seed,
        shuffle=not config.data.curriculum,
        rollout_func=None if path is None else load_function(path, config.folder, "trl.rollout_func"),
    )


def watch_rollouts(
    trainer: MethodTrainer, section: RolloutSection, folder: Path, *, writes: bool = True
) -> TrainerCallback:
    """Have completions shown, and written to the run's folder; the callback that keeps rollouts in checkpoints."""
    rollouts = trainer.rollouts
    assert rollouts is not None
    producer = rollouts.producer
    if isinstance(producer.roll, CustomRollout):
        producer.roll.trainer = trainer
    if trainer.is_world_process_zero():
        names, decode = producer.scorer.names, producer.decode
        if writes:
            files = CompletionFiles(folder, names, decode)
            rollouts.written.append(files)
            rollouts.evaluated.append(files.of_evaluation)
        if section.log_completions:
            every = int(trainer.args.logging_steps)
            rollouts.written.append(ShownCompletions(every, section.completions_shown or 4, names, decode))
    return KeepRollouts(rollouts)


def make_rollouts(
    model: Any,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    *,
    rows: Rows,
    plan: Plan,
    section: RolloutSection,
    rewards: Sequence[Reward],
    seed: int,
    shuffle: bool = True,
    rollout_func: Callable[..., Any] | None = None,
) -> Rollouts:
    """Prompts, sampler, rewards and method, put together."""
    logger.info(
        "%s: the loss is near 0 and may rise while the policy learns; it is no measure of progress: watch reward, "
        "reward_std and kl",
        method.name,
    )
    policy = getattr(method, "policy")  # noqa: B009 - online methods have one
    ranks = PartialState()
    scorer = Scorer(rewards, workers=section.reward_workers, timeout=section.reward_timeout)
    generator = None if rollout_func is not None else InProcess(model, tokenizer, engine=engine)
    if rollout_func is not None:
        name = getattr(rollout_func, "__name__", type(rollout_func).__name__)
        roll: Any = CustomRollout(rollout_func, name, model, tokenizer)
    else:
        assert generator is not None
        roll = SingleTurn(generator)
    producer = Producer(
        method=method,
        plan=plan,
        rows=rows,
        order=PromptOrder(len(rows), seed, shuffle=shuffle),
        roll=roll,
        scorer=scorer,
        sampling=sampling_of(section, policy.max_completion_length),
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        seed=seed,
        extra_rounds=section.dynamic_sampling,
        streaming_groups=section.streaming_groups if section.streaming else None,
        ranks=Ranks(ranks.process_index, ranks.num_processes, from_all_ranks),
    )
    return Rollouts(
        producer,
        method,
        generator,
        eval_size=section.num_generations_eval or method.group_size,
        mask_truncated=policy.mask_truncated_completions,
        sampler_logps=bool(policy.sampler_correction),
        skips_idle=section.skip_zero_advantage,
    )
