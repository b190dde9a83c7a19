"""The environment of a config or a script, and the completion source that runs its episodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from upweight.config import Config
from upweight.config.sections.environment import EnvironmentSection
from upweight.config.sections.rollout import GymSection
from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.data.tokenize.templates import ChatTemplate
from upweight.engine.forward import base_of
from upweight.environments.call_formats import format_of
from upweight.environments.episode import Environment
from upweight.environments.nemo_gym.environment import NemoGym
from upweight.environments.nemo_gym.gym import Gym
from upweight.environments.nemo_gym.process import GymProcess
from upweight.environments.python_class import PythonEnvironment
from upweight.rewards.call import ENVIRONMENTS
from upweight.rewards.environment import COLUMN as EPISODE
from upweight.rewards.reward import Reward, check_columns
from upweight.rollout.episodes.gateway import PolicyGateway
from upweight.rollout.episodes.gym_agents import GymAgents
from upweight.rollout.episodes.loop import EpisodeLimits, EpisodeSetup
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.rollout.producer import CompletionSource
from upweight.rollout.vllm.server import VllmServer
from upweight.sampler.in_process import end_tokens
from upweight.train.distributed.ranks import broadcast_from_rank0
from upweight.train.objects import YAML_ONLY, Objects
from upweight.types import Generator
from upweight.user_modules import load_function


@dataclass(frozen=True)
class EnvironmentSetup:
    """An environment, the bounds of its episodes, and how tools and prompts are rendered."""

    environment: Environment
    bounds: EpisodeLimits
    tool_format: str = "auto"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    default_system: str | None = None

    def completion_source(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, generator: Generator | None
    ) -> CompletionSource:
        """Return the runner that fills groups with episodes."""
        template = ChatTemplate(tokenizer, None, self.template_args)
        setup = EpisodeSetup(
            self.environment,
            template,
            ends=end_tokens(base_of(model), tokenizer),
            bounds=self.bounds,
            tool_format=format_of(_source(tokenizer)) if self.tool_format == "auto" else self.tool_format,
            default_system=self.default_system,
        )
        return EpisodeRunner(setup, generator)


@dataclass(frozen=True)
class GymAgentSetup(EnvironmentSetup):
    """A NeMo Gym environment whose agents run the turns."""

    gym: GymSection = field(default_factory=GymSection)

    def completion_source(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, generator: Generator | None
    ) -> CompletionSource:
        """Return the source that gets episodes from the agents."""
        assert isinstance(self.environment, NemoGym)
        assert generator is None or isinstance(generator, VllmServer), "a rule refuses agents without a server"
        gateway = None
        if generator is not None:
            gateway = PolicyGateway(generator, self.gym.policy_port, self.template_args)
        return GymAgents(self.environment, gateway)


def environment_setup(config: Config, objects: Objects = YAML_ONLY) -> EnvironmentSetup | None:
    """Return the environment of the config or the script; None for single-turn completions."""
    section = config.environment
    if objects.tools or objects.environment_factory is not None:
        factory, tools = objects.environment_factory, list(objects.tools or ())
        environment = python_environment(section, factory, tools, "environment_factory")
        return EnvironmentSetup(environment, episode_limits(section), template_args=config.data.template_args)
    if config.method.online and config.gym.enabled:
        return _gym(config)
    if not config.method.online or not section.acts:
        return None
    return EnvironmentSetup(
        _environment(section, config.folder),
        episode_limits(section),
        section.tool_format,
        config.data.template_args,
        config.data.default_system_message,
    )


def _gym(config: Config) -> EnvironmentSetup:
    """Return the NeMo Gym of a config: running servers, or those that rank 0 starts."""
    section = config.gym
    name = section.model_name or str(config.model.base_model)
    policy = (f"http://127.0.0.1:{section.policy_port}/v1", name) if section.multi_turn else None
    process = None
    if section.auto_start and PartialState().process_index == 0:
        process = GymProcess(section, config.folder, Path(config.run.output_dir), policy=policy)
    socket = broadcast_from_rank0(None if process is None else process.socket)
    gym = Gym(
        section.head_port, patience=section.server_timeout, busy=section.verify_timeout, process=process, socket=socket
    )
    bounds = EpisodeLimits(section.max_turns or config.environment.max_turns, section.run_timeout, section.run_timeout)
    rendering = (config.environment.tool_format, config.data.template_args, config.data.default_system_message)
    environment = NemoGym(section, gym, name)
    if section.multi_turn:
        return GymAgentSetup(environment, bounds, *rendering, gym=section)
    return EnvironmentSetup(environment, bounds, *rendering)


def episode_limits(section: EnvironmentSection) -> EpisodeLimits:
    """Return the limits of episodes; the time limit leaves the environment room to report a tool that timed out."""
    waits = section.wait if section.kind == "openenv" else 0.0
    return EpisodeLimits(section.max_turns, section.timeout + section.tool_timeout, section.episode_timeout, waits)


def python_environment(
    section: EnvironmentSection,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
    functions: Sequence[Callable[..., Any]],
    key: str = "environment.class",
) -> PythonEnvironment:
    """Return an environment of a user's class, functions, or both."""
    return PythonEnvironment(factory, functions, timeout=section.timeout, tool_timeout=section.tool_timeout, key=key)


def check_rewards(rewards: Sequence[Reward], columns: Sequence[str], env_setup: EnvironmentSetup | None) -> None:
    """Refuse rewards that read columns which neither the data nor an environment provides."""
    available = [*columns, *([] if env_setup is None else [EPISODE])]
    if env_setup is not None and isinstance(env_setup.environment, PythonEnvironment) and env_setup.environment.classes:
        available.append(ENVIRONMENTS)
    check_columns(rewards, [name for name in available if name not in PREPARED_COLUMNS])


def _environment(section: EnvironmentSection, folder: Path) -> Environment:
    if section.kind == "openenv":
        from upweight.environments.openenv import OpenEnv  # an optional package

        assert section.url is not None, "a rule requires the url"
        return OpenEnv(
            section.url,
            section.reward,
            section.columns,
            section.text_field,
            section.observation,
            timeout=section.timeout,
            wait=section.wait,
        )
    factory = None
    if section.class_path is not None:
        factory = load_function(section.class_path, folder, "environment.class")
    functions = [load_function(path, folder, "tools") for path in section.tools]
    return python_environment(section, factory, functions)


def _source(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a tokenizer's chat templates."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")
