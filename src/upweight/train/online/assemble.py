"""Build the rollouts of an online run from its prompts, sampler, rewards and method."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import PartialState

from upweight.config import Config
from upweight.config.resolve import generation_batch
from upweight.config.sections.rollout import IN_PROCESS, RolloutSection
from upweight.data.stream.feed import RowFeed
from upweight.engine.routing import install_routing
from upweight.errors import UserError
from upweight.log import counted, logger
from upweight.methods import feature_matcher
from upweight.methods.base import Method
from upweight.models.load import compute_dtype
from upweight.models.modules import unwrap_peft
from upweight.rewards.load import as_rewards, load_rewards
from upweight.rewards.model import ModelOptions
from upweight.rewards.reward import Reward
from upweight.rewards.scorer import Scorer
from upweight.rollout.completion_source import CompletionSource, SingleTurn, WithDemonstrations
from upweight.rollout.custom import CustomRollout
from upweight.rollout.fed_prompts import FedPrompts
from upweight.rollout.plan import Plan, PromptOrder
from upweight.rollout.producer import Producer, Ranks
from upweight.rollout.replay import ReplayBuffer, Reroll
from upweight.rollout.rollout import PromptRows
from upweight.rollout.run_ahead import bounded_depth
from upweight.rollout.sampling_params import build_sampling
from upweight.train.arguments import step_size
from upweight.train.distill.sample import TeacherSampler
from upweight.train.distributed.fsdp import whole_weights
from upweight.train.distributed.ranks import ShardedWork, all_gather_objects
from upweight.train.objects import YAML_ONLY, Objects
from upweight.train.online.backends import Backend, BackendInputs, backend_of
from upweight.train.online.broadcast import broadcast_rollout
from upweight.train.online.environments import EnvironmentSetup, check_rewards
from upweight.train.online.feature_matching import FeatureMatching, build_feature_matching
from upweight.train.online.feed import RolloutFeed, RolloutSchedule
from upweight.train.policy import Policy, image_problems
from upweight.types import ChecksSampling, Compiles, Generator
from upweight.user_modules import load_function

MAX_REROLL = 1024  # failed prompts remembered
LOSS_IS_NO_MEASURE = (
    "%s: the loss is no measure of progress (that of a policy gradient is near 0 and may rise while it learns): watch "
    "reward, group_reward_std%s"
)
ZERO_ADVANTAGE_FORWARDED = (
    "%s: completions without an advantage are forwarded like all others, for the sake of %s; "
    "trl.skip_zero_advantage_batches has nothing to skip"
)
USERS_LOSS_FORWARDS = (
    "trl.loss_type: completions without an advantage are forwarded like all others, since '%s' may act on them; "
    "if it has no gradient at an advantage of 0, write '%s.skip_zero_advantage = True' below it, and they are skipped"
)


def build_plan(config: Config, ranks: int) -> Plan:
    """Return the sizes of a config's rollouts."""
    wanted, iterations = generation_batch(config, ranks), config.rollout.num_iterations
    return Plan.fitting(wanted, config.method.group_size, step_size(config) * ranks, iterations)


def build_rewards(
    config: Config,
    device: torch.device,
    columns: Sequence[str],
    env_setup: EnvironmentSetup | None = None,
    objects: Objects = YAML_ONLY,
) -> list[Reward]:
    """Load the rewards of the config or script and of the environment; check that the columns they read exist."""
    dtype, remote = compute_dtype(config.model, device), config.model.trust_remote_code
    by_step = config.method.discount is not None
    models = ModelOptions(dtype, device, remote, config.data.template_timeout, by_step)
    names = () if env_setup is None else env_setup.environment.reward_names
    if objects.from_script:
        rewards = as_rewards(objects.reward_funcs, objects.reward_tokenizers, models=models, environment=names)
    else:
        rewards = load_rewards(config.rollout.reward_funcs, config.folder, models=models, environment=names)
    wanted = config.method.needs_rewards
    if not rewards and wanted and (objects.from_script or env_setup is not None):
        raise UserError("trl.reward_funcs: empty, and no environment gives rewards to compare completions: give one.")
    online = config.method.online_settings
    weights = None if online is None or feature_matcher(config.method) else online.reward_weights
    if weights is not None and len(weights) != len(rewards):  # rules of the config cannot count an environment's
        names = ", ".join(reward.name for reward in rewards)
        count = f"{counted(len(weights), 'weight')} for {counted(len(rewards), 'reward')} ({names})"
        raise UserError(f"trl.reward_weights: {count}. Give one for each.")
    check_rewards(rewards, columns, env_setup)
    return rewards


def build_rollouts(
    config: Config,
    objects: Objects,
    policy: Policy,
    prompts: PromptRows | RowFeed,
    rewards: Sequence[Reward],
    *,
    env_setup: EnvironmentSetup | None,
) -> RolloutFeed:
    """Build sampler, completion source, producer and schedule of the rollouts."""
    method, section, tokenizer, ranks = config.method, config.rollout, policy.tokenizer, PartialState()
    online_settings, function = method.online_settings, _rollout_func(config, objects)
    assert online_settings is not None, "online methods have online settings"
    balanced = ["router_aux_loss_coef"] if policy.router_coefficient else []
    _log_what_to_watch(method, section, [*online_settings.zero_advantage_reasons, *balanced])
    feature_matching = build_feature_matching(policy)
    sampling = build_sampling(section, online_settings.max_completion_length)
    if feature_matching is not None and method.strided:
        sampling = feature_matching.block_sampling()
    plan = build_plan(config, ranks.num_processes // config.sharding.context_parallel_size)
    (rows, order), backend = _prompts(config, prompts, plan), backend_of(config)
    # All ranks send their shards to a server together.
    sharded_work = ShardedWork(policy.model) if policy.sharded and backend.rank0_only else None
    _set_up_replay(section, policy, function)
    generator = None
    if function is None or section.backend != IN_PROCESS:
        generator = backend.build(BackendInputs(config, policy, rows, sampling, sharded_work))
    schedule = _rollout_schedule(section, plan, policy, sharded_work, backend)
    off_policy = schedule.depth or section.replay_size or section.backend != IN_PROCESS or section.sampler_quantization
    masks_off_policy = function is not None and online_settings.off_policy_mask_threshold is not None
    producer = Producer(
        method=method,
        plan=plan,
        rows=rows,
        order=order,
        completion_source=_completion_source(config, policy, function, generator, env_setup, feature_matching),
        scorer=Scorer(rewards, workers=section.reward_workers, timeout=section.reward_timeout),
        sampling=sampling,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        seed=config.optim.seed,
        ranks=Ranks() if backend.rank0_only else Ranks(ranks.process_index, ranks.num_processes, all_gather_objects),
        longest=feature_matching.longest if feature_matching is not None and feature_matching.adapts else None,
        check_sampling=generator.check_sampling if isinstance(generator, ChecksSampling) else None,
        compiles=generator if isinstance(generator, Compiles) else None,
        extra_rounds=section.dynamic_sampling,
        streaming_groups=section.streaming_groups if section.streaming else None,
        replay=ReplayBuffer(section.replay_size, section.replay_max_age) if section.replay_size else None,
        reroll=Reroll(section.reroll_start, section.reroll_groups, MAX_REROLL) if section.reroll_start < 1 else None,
    )
    return RolloutFeed(
        producer,
        generator,
        section,
        schedule,
        eval_size=section.num_generations_eval or method.group_size,
        mask_truncated=online_settings.mask_truncated_completions,
        sampler_logps=bool(off_policy or masks_off_policy or online_settings.sampler_correction),
        feature_matching=feature_matching,
        evaluates_loss=method.evaluates_loss or (objects.from_script and _has_plain_advantages(method)),
    )


def _set_up_replay(section: RolloutSection, policy: Policy, function: Callable[..., Any] | None) -> None:
    """Let the sampler record its experts, and the policy's forwards use or only measure them."""
    if section.routing_replay is False:
        return
    if function is not None:
        raise UserError("trl.routing_replay: a rollout function records no experts. Leave it out.")
    install_routing(unwrap_peft(policy.model))
    policy.engine.replay = section.routing_replay is True


def _rollout_func(config: Config, objects: Objects) -> Callable[..., Any] | None:
    """Return the user's function that samples, of the script or by its path in the config."""
    path = config.rollout.rollout_func
    if objects.rollout_func is not None or path is None:
        return objects.rollout_func
    return load_function(path, config.folder, "trl.rollout_func")


def _has_plain_advantages(method: Method) -> bool:
    """Whether any number of completions of a prompt has advantages; a user's function may expect those of training."""
    return feature_matcher(method) is None and method.advantage_function is None


def _log_what_to_watch(method: Method, section: RolloutSection, forwarded_for: Sequence[str]) -> None:
    """Log what the loss says, and for what completions without an advantage are forwarded."""
    if not method.evaluates_loss:
        logger.info(LOSS_IS_NO_MEASURE, method.name, " and kl" if method.needs_reference else "")
    if not section.skip_zero_advantage or method.strided or not forwarded_for:
        return
    if (users := method.loss_function) is not None and len(forwarded_for) == 1:
        logger.info(USERS_LOSS_FORWARDS, users.function.name, users.function.name.rpartition(".")[2])
    else:
        logger.info(ZERO_ADVANTAGE_FORWARDED, method.name, " and ".join(forwarded_for))


def _prompts(config: Config, rows: PromptRows | RowFeed, plan: Plan) -> tuple[PromptRows, PromptOrder | FedPrompts]:
    """Return the prompts and their order; where the length of a stream is not known, an epoch is the run."""
    if isinstance(rows, RowFeed):
        completions = (config.optim.max_steps or 0) * plan.step_size // plan.iterations
        fed = FedPrompts(rows, rows.epoch_rows or max(completions // plan.group_size, 1))
        return fed, fed
    ordered = config.data.curriculum or config.data.curriculum_column is not None
    return rows, PromptOrder(len(rows), config.order_seed, shuffle=not ordered)


def _completion_source(  # noqa: PLR0917
    config: Config,
    policy: Policy,
    function: Callable[..., Any] | None,
    generator: Generator | None,
    env_setup: EnvironmentSetup | None,
    feature_matching: FeatureMatching | None,
) -> CompletionSource:
    """Return the source of completions: EBFT's, a user's function, an environment, or the sampler alone."""
    model, tokenizer = policy.model, policy.tokenizer
    if feature_matching is not None:
        return feature_matching.completion_source(policy, generator)
    if function is not None:
        return CustomRollout(function, getattr(function, "__name__", type(function).__name__), model, tokenizer)
    alone = env_setup is None
    source: CompletionSource = SingleTurn(generator)
    if not alone:
        problem = next(image_problems(config, model, PartialState().num_processes), None)
        options = {"folder": config.folder, "image_problem": problem}
        source = env_setup.completion_source(model, tokenizer, generator, **options)
    share = policy.method.demonstration_share
    writer = TeacherSampler(policy) if policy.method.teacher_writes else None
    return WithDemonstrations(source, share, writer) if share else source


def _rollout_schedule(
    section: RolloutSection, plan: Plan, policy: Policy, sharded_work: ShardedWork | None, backend: Backend
) -> RolloutSchedule:
    """Return how far rollouts run ahead, how often the sampler syncs, and which ranks produce."""
    ranks, interval = PartialState(), section.sync_interval if section.use_vllm else 1
    alone = backend.rank0_only and ranks.num_processes > 1
    ahead = section.prefetch_depth if section.async_prefetch else 0
    depth = bounded_depth(plan, ahead, interval, section.max_staleness)
    gathers = policy.sharded and not backend.rank0_only
    return RolloutSchedule(
        depth=depth,
        threaded=backend.threaded and depth > 0,
        sync_interval=interval,
        broadcast=broadcast_rollout if alone else None,
        produces=not alone or ranks.process_index == 0,
        sharded_work=sharded_work,
        gathered_weights=partial(whole_weights, policy.model, policy.engine) if gathers else nullcontext,
    )
