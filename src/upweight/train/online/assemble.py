"""Build the rollouts of an online run from its prompts, sampler, rewards and method."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from upweight.config import Config
from upweight.config.resolve import generation_batch
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.log import logger
from upweight.methods import feature_matcher
from upweight.methods.base import PolicySettings
from upweight.models.load import compute_dtype
from upweight.rewards.load import as_rewards, load_rewards
from upweight.rewards.model import ModelOptions
from upweight.rewards.reward import Reward
from upweight.rewards.scorer import Scorer
from upweight.rollout.custom import CustomRollout
from upweight.rollout.plan import Plan, PromptOrder
from upweight.rollout.producer import CompletionSource, Producer, Ranks
from upweight.rollout.replay import ReplayBuffer
from upweight.rollout.reroll import Reroll
from upweight.rollout.rollout import PromptRows
from upweight.rollout.run_ahead import bounded_depth
from upweight.rollout.sampling_params import sampling_of
from upweight.rollout.single_turn import SingleTurn
from upweight.rollout.vllm.colocated import VllmColocated
from upweight.sampler.in_process import InProcess
from upweight.train.distributed.fsdp import whole_weights
from upweight.train.distributed.ranks import ShardedWork, all_gather_objects
from upweight.train.objects import YAML_ONLY, Objects
from upweight.train.online.broadcast import broadcast_rollout
from upweight.train.online.environments import EnvironmentSetup, check_rewards
from upweight.train.online.feature_matching import FeatureMatching, feature_matching_of
from upweight.train.online.feed import RolloutFeed, RolloutSchedule
from upweight.train.online.vllm import Vllm, server_for
from upweight.train.policy import Policy
from upweight.types import Generator, Sampling
from upweight.user_modules import load_function

REROLL_CAPACITY = 1024  # failed prompts remembered
LOSS_IS_NO_MEASURE = (
    "%s: the loss is near 0 and may rise while the policy learns; it is no measure of progress: watch reward, "
    "group_reward_std%s"
)
ZERO_ADVANTAGE_FORWARDED = (
    "%s: completions without an advantage are forwarded like all others, for the sake of %s; "
    "trl.skip_zero_advantage_batches leaves out those that nothing is computed from"
)


@dataclass(frozen=True)
class RolloutSpec:
    """The inputs that rollouts are built from."""

    rows: PromptRows
    rewards: Sequence[Reward]
    plan: Plan
    section: RolloutSection
    folder: Path  # of the run
    seed: int
    shuffle: bool = True
    env_setup: EnvironmentSetup | None = None
    rollout_func: Callable[..., Any] | None = None  # a user's function that returns completions


def plan_of(config: Config, ranks: int) -> Plan:
    """Return the sizes of a config's rollouts."""
    step = (config.optim.micro_batch_size or 1) * (config.optim.accumulation or 1) * ranks
    return Plan.fitting(generation_batch(config, ranks), config.method.group_size, step, config.rollout.num_iterations)


def rewards_of(
    config: Config,
    device: torch.device,
    columns: Sequence[str],
    env_setup: EnvironmentSetup | None = None,
    objects: Objects = YAML_ONLY,
) -> list[Reward]:
    """Load the rewards of the config or script and of the environment; check that the columns they read exist."""
    models = ModelOptions(compute_dtype(config.model, device), device, config.model.trust_remote_code)
    names = () if env_setup is None else env_setup.environment.reward_names
    if objects.from_script:
        rewards = as_rewards(objects.reward_funcs, objects.reward_tokenizers, models=models, environment=names)
    else:
        rewards = load_rewards(config.rollout.reward_funcs, config.folder, models=models, environment=names)
    if not rewards and (objects.from_script or env_setup is not None):
        raise UserError(
            "trl.reward_funcs: empty. A group of completions is compared by rewards, and no environment gives any: "
            "give at least one."
        )
    policy = config.method.policy_settings
    weights = None if policy is None or feature_matcher(config.method) else policy.reward_weights
    if weights is not None and len(weights) != len(rewards):  # rules of the config cannot count an environment's
        names = ", ".join(reward.name for reward in rewards)
        raise UserError(
            f"trl.reward_weights: {len(weights)} weights for {len(rewards)} rewards ({names}). Give one for each."
        )
    check_rewards(rewards, columns, env_setup)
    return rewards


def rollouts_of(
    config: Config,
    objects: Objects,
    policy: Policy,
    rows: PromptRows,
    rewards: Sequence[Reward],
    *,
    env_setup: EnvironmentSetup | None,
) -> RolloutFeed:
    """Build the rollouts of a config."""
    function, path = objects.rollout_func, config.rollout.rollout_func
    if function is None and path is not None:
        function = load_function(path, config.folder, "trl.rollout_func")
    spec = RolloutSpec(
        rows,
        rewards,
        plan_of(config, PartialState().num_processes // config.sharding.context_parallel_size),
        config.rollout,
        Path(config.run.output_dir),
        config.optim.seed,
        shuffle=not config.data.curriculum,
        env_setup=env_setup,
        rollout_func=function,
    )
    return make_rollouts(policy, spec)


def make_rollouts(policy: Policy, spec: RolloutSpec) -> RolloutFeed:
    """Build sampler, completion source, producer and schedule of the rollouts."""
    method, section, ranks, tokenizer = policy.method, spec.section, PartialState(), policy.tokenizer
    gradient = method.policy_settings
    assert gradient is not None, "online methods have policy settings"
    server = server_for(
        section,
        policy.model,
        tokenizer,
        dtype=policy.dtype,
        folder=spec.folder,
        rows=spec.rows,
        max_new_tokens=gradient.max_completion_length,
    )
    logger.info(LOSS_IS_NO_MEASURE, method.name, " and kl" if method.needs_reference else "")
    feature_matching = feature_matching_of(
        method, policy.model, policy.dtype, policy.reference, offload=policy.offload_reference
    )
    strided = feature_matching is not None and feature_matching.strided
    if section.skip_zero_advantage and gradient.zero_advantage_reasons and not strided:
        logger.info(ZERO_ADVANTAGE_FORWARDED, method.name, " and ".join(gradient.zero_advantage_reasons))
    sampling = (
        sampling_of(section, gradient.max_completion_length)
        if feature_matching is None
        else feature_matching.sampling(section)
    )
    generator: Generator | None = server
    if spec.rollout_func is None and not section.use_vllm:
        generator = _in_process(policy, spec, sampling, endless=strided)
    producer = Producer(
        method=method,
        plan=spec.plan,
        rows=spec.rows,
        order=PromptOrder(len(spec.rows), spec.seed, shuffle=spec.shuffle),
        completion_source=_completion_source(policy, spec, generator, feature_matching),
        scorer=Scorer(spec.rewards, workers=section.reward_workers, timeout=section.reward_timeout),
        sampling=sampling,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        seed=spec.seed,
        ranks=Ranks() if section.use_vllm else Ranks(ranks.process_index, ranks.num_processes, all_gather_objects),
        longest=feature_matching.longest if feature_matching is not None and feature_matching.adapts else None,
        prove=generator.prove if isinstance(generator, InProcess) else None,
        **_resampling_options(section),
    )
    schedule = _schedule(section, spec.plan, policy, server)
    return RolloutFeed(
        producer,
        method,
        generator,
        eval_size=section.num_generations_eval or method.group_size,
        schedule=schedule,
        mask_truncated=gradient.mask_truncated_completions,
        sampler_logps=_uses_sampler_logps(gradient, section, schedule.depth, custom=spec.rollout_func is not None),
        skip_zero_advantage=section.skip_zero_advantage,
        recompute_replayed=section.replay_recompute,
        feature_matching=feature_matching,
    )


def _uses_sampler_logps(policy: PolicySettings, section: RolloutSection, depth: int, *, custom: bool) -> bool:
    """Whether the loss needs the sampler's log-probs: the sampler may hold older weights or be another program."""
    if policy.sampler_correction or section.use_vllm or depth or section.replay_size:
        return True
    return custom and policy.off_policy_mask_threshold is not None


def _in_process(policy: Policy, spec: RolloutSpec, sampling: Sampling, *, endless: bool) -> InProcess:
    """Return the in-process sampler; raise now where the longest row would not fit."""
    generator = InProcess(
        policy.model,
        policy.tokenizer,
        engine=policy.engine,
        end_ids=() if endless else None,
        device=_device(policy),
        compile=spec.section.compile_sampler,
    )
    rows = spec.rows
    longest = max((_tokens(rows[number], sampling) for number in range(len(rows))), default=0)
    generator.require_room(longest, sampling.max_new_tokens)
    return generator


def _device(policy: Policy) -> torch.device | None:
    """Return the device of a sharded model, whose weights may still be on the CPU; None: that of its weights."""
    return PartialState().device if policy.sharded else None


def _tokens(row: Mapping[str, Any], sampling: Sampling) -> int:
    """Return the most tokens that a row may have before its last sampled turn."""
    if "ids" in row:
        return len(row["ids"]) - sampling.max_new_tokens
    replies = (row.get("truth_ids") or [])[1::2]
    return len(row["prompt_ids"]) + sum(len(reply) + sampling.max_new_tokens for reply in replies)


def _completion_source(
    policy: Policy, spec: RolloutSpec, generator: Generator | None, feature_matching: FeatureMatching | None
) -> CompletionSource:
    """Return the source of completions: EBFT's, a user's function, an environment, or the sampler alone."""
    model, tokenizer, function = policy.model, policy.tokenizer, spec.rollout_func
    if feature_matching is not None:
        return feature_matching.completion_source(model, tokenizer, generator, policy.engine, _device(policy))
    if function is not None:
        return CustomRollout(function, getattr(function, "__name__", type(function).__name__), model, tokenizer)
    return (
        SingleTurn(generator)
        if spec.env_setup is None
        else spec.env_setup.completion_source(model, tokenizer, generator)
    )


def _resampling_options(section: RolloutSection) -> dict[str, Any]:
    """Return the options of dynamic sampling, streaming, replay and reroll that are turned on."""
    options: dict[str, Any] = {"extra_rounds": section.dynamic_sampling}
    if section.streaming:
        options["streaming_groups"] = section.streaming_groups
    if section.replay_size:
        options["replay"] = ReplayBuffer(section.replay_size, section.replay_max_age)
    if section.reroll_start < 1:
        options["reroll"] = Reroll(section.reroll_start, section.reroll_groups, REROLL_CAPACITY)
    return options


def _schedule(section: RolloutSection, plan: Plan, policy: Policy, server: Vllm | None) -> RolloutSchedule:
    """Return how far rollouts run ahead, how often the sampler syncs, and which ranks produce (with vLLM rank 0 only).

    Sharded weights are gathered for the in-process sampler, or sent to a server by all ranks together.
    """
    ranks, sharded_work = PartialState(), None
    interval = section.sync_interval if section.use_vllm else 1
    depth = bounded_depth(
        plan, section.prefetch_depth if section.async_prefetch else 0, interval, section.max_staleness
    )
    if policy.sharded and section.use_vllm:
        sharded_work = ShardedWork(policy.model)
        if server is not None:
            assert not isinstance(server, VllmColocated), "a rule refuses shards without a server"
            server.on_model(sharded_work.lead)
    gathers = policy.sharded and not section.use_vllm
    return RolloutSchedule(
        depth=depth,
        threaded=section.use_vllm and depth > 0,
        sync_interval=interval,
        broadcast=broadcast_rollout if section.use_vllm and ranks.num_processes > 1 else None,
        drives=not section.use_vllm or ranks.process_index == 0,
        sharded_work=sharded_work,
        gathered_weights=partial(whole_weights, policy.model, policy.engine) if gathers else nullcontext,
    )
