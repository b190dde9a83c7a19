"""The environment of a config or a script, and the completion source that runs its episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState

from upweight.config import Config
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.sections.environment import EnvironmentSection
from upweight.data.encode import row_images
from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.data.tokenize.templates import ChatTemplate
from upweight.environments.call_formats import call_format_of
from upweight.environments.episode import Environment
from upweight.environments.nemo_gym.gym import NemoGym
from upweight.environments.nemo_gym.process import GymProcess
from upweight.environments.python_class import PythonEnvironment
from upweight.models.modules import unwrap_peft
from upweight.models.tokenizer import eos_token_ids
from upweight.rewards.load import EPISODE
from upweight.rewards.reward import ENVIRONMENTS, Reward, check_columns
from upweight.rollout.completion_source import CompletionSource
from upweight.rollout.episodes.gym_agents import GymAgents, PolicyGateway
from upweight.rollout.episodes.loop import EpisodeLimits, EpisodeSetup
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.rollout.vllm.server import VllmServer
from upweight.train.distributed.ranks import broadcast_from_rank0
from upweight.train.objects import YAML_ONLY, Objects, Tokenizer
from upweight.types import Generator
from upweight.user_modules import load_function


@dataclass(frozen=True)
class EnvironmentSetup:
    """An environment, the limits of its episodes, and how tools and prompts are rendered."""

    environment: Environment
    limits: EpisodeLimits
    tool_format: str = "auto"
    data: DataSection = field(default_factory=DataSection)  # with the chat template's variables, and the system text
    agents_port: int | None = None  # at which agents of NeMo Gym, which run the turns, reach the policy

    def completion_source(
        self,
        model: Any,
        tokenizer: Tokenizer,
        generator: Generator | None,
        *,
        folder: Path | None = None,  # where paths of images begin, beside the working folder
        image_problem: str | None = None,  # why images cannot be trained on
    ) -> CompletionSource:
        """Return the runner that fills groups with episodes, or the source that gets them from a gym's agents."""
        if self.agents_port is not None:
            assert isinstance(self.environment, NemoGym)
            assert generator is None or isinstance(generator, VllmServer), "a rule refuses agents without a server"
            gateway = None if generator is None else PolicyGateway(generator, self.agents_port, self.data.template_args)
            return GymAgents(self.environment, gateway)
        template = tokenizer.chat_template
        source = "\n".join(template.values()) if isinstance(template, dict) else str(template or "")
        setup = EpisodeSetup(
            self.environment,
            ChatTemplate(tokenizer, None, self.data.template_args, self.data.template_timeout),
            ends=eos_token_ids(unwrap_peft(model), tokenizer),
            limits=self.limits,
            tool_format=call_format_of(source) if self.tool_format == "auto" else self.tool_format,
            default_system=self.data.default_system_message,
            images=row_images(self.data, DatasetSpec(), tokenizer, folder or Path()),
            image_problem=image_problem,
        )
        return EpisodeRunner(setup, generator)


def environment_setup(config: Config, objects: Objects = YAML_ONLY) -> EnvironmentSetup | None:
    """Return the environment of the config or the script; None for single-turn completions."""
    section = config.environment
    if not objects.tools and objects.environment_factory is None:
        if config.method.online and config.gym.enabled:
            return _gym_setup(config)
        if not config.method.online or not section.acts:
            return None
    # The time limit leaves the environment room to report a tool that timed out.
    call_seconds, waits = section.timeout + section.tool_timeout, section.wait if section.kind == "openenv" else 0.0
    limits = EpisodeLimits(section.max_turns, call_seconds, section.episode_timeout, waits)
    environment = _build_environment(section, config.folder, objects)
    return EnvironmentSetup(environment, limits, section.tool_format, config.data)


def _gym_setup(config: Config) -> EnvironmentSetup:
    """Return the NeMo Gym of a config: running servers, or those that rank 0 starts."""
    section = config.gym
    name = section.model_name or str(config.model.base_model)
    policy = (f"http://127.0.0.1:{section.policy_port}/v1", name) if section.multi_turn else None
    process = None
    if section.auto_start and PartialState().process_index == 0:
        process = GymProcess(section, config.folder, Path(config.run.output_dir), policy=policy)
    uds = broadcast_from_rank0(None if process is None else process.uds)
    gym, turns = NemoGym(section, name, process, uds), section.max_turns or config.environment.max_turns
    limits = EpisodeLimits(turns, section.run_timeout, section.run_timeout)
    port = section.policy_port if section.multi_turn else None
    return EnvironmentSetup(gym, limits, config.environment.tool_format, config.data, port)


def check_rewards(rewards: Sequence[Reward], columns: Sequence[str], env_setup: EnvironmentSetup | None) -> None:
    """Refuse rewards that read columns which neither the data nor an environment provides."""
    available = [*columns, *([] if env_setup is None else [EPISODE])]
    if env_setup is not None and isinstance(env_setup.environment, PythonEnvironment) and env_setup.environment.classes:
        available.append(ENVIRONMENTS)
    check_columns(rewards, [name for name in available if name not in PREPARED_COLUMNS])


def _build_environment(section: EnvironmentSection, folder: Path, objects: Objects) -> Environment:
    """Return the environment of OpenEnv, or of a user's class (or several by name), functions, or both."""
    key, factory, functions = "environment_factory", objects.environment_factory, list(objects.tools or ())
    if section.kind == "openenv":
        from upweight.environments.openenv import OpenEnv  # an optional package

        assert section.url is not None, "a rule requires the url"
        reads = (section.reward, section.columns, section.text_field, section.observation, section.image)
        return OpenEnv(section.url, *reads, timeout=section.timeout, wait=section.wait)
    if factory is None and not functions:
        key, path = "environment.class", section.class_path
        factory = None if path is None else load_function(path, folder, key)
        functions = [load_function(path, folder, "tools") for path in section.tools]
    return PythonEnvironment(factory, functions, timeout=section.timeout, tool_timeout=section.tool_timeout, key=key)
