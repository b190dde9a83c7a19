"""NeMo Gym as what a config's policy acts in."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from upweight.config import Config
from upweight.config.sections.rollout import GymSection
from upweight.environments.nemo_gym.environment import NemoGym
from upweight.environments.nemo_gym.gym import Gym
from upweight.environments.nemo_gym.process import GymProcess
from upweight.rollout.episodes.gateway import PolicyGateway
from upweight.rollout.episodes.gym_agents import GymAgents
from upweight.rollout.episodes.loop import Bounds
from upweight.rollout.producer import CompletionSource
from upweight.rollout.vllm.server import VllmServer
from upweight.train.distributed.ranks import broadcast_from_rank0
from upweight.train.online.environments import EnvironmentSetup
from upweight.types import Generator


@dataclass(frozen=True)
class GymAgentSetup(EnvironmentSetup):
    """A Gym whose agents drive the turns."""

    gym: GymSection = field(default_factory=GymSection)

    def player(self, model: Any, tokenizer: PreTrainedTokenizerBase, generator: Generator | None) -> CompletionSource:
        """What fills groups by asking the agents."""
        assert isinstance(self.environment, NemoGym)
        assert generator is None or isinstance(generator, VllmServer), "a rule holds that there is a server"
        gateway = None
        if generator is not None:
            gateway = PolicyGateway(generator, self.gym.policy_port, self.template_args)
        return GymAgents(self.environment, gateway)


def gym_setup(config: Config) -> EnvironmentSetup:
    """The Gym that a config names: its own servers, or those that rank 0 starts."""
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
    bounds = Bounds(section.max_turns or config.environment.max_turns, section.run_timeout, section.run_timeout)
    told = (config.environment.tool_format, config.data.template_args, config.data.default_system_message)
    environment = NemoGym(section, gym, name)
    if section.multi_turn:
        return GymAgentSetup(environment, bounds, *told, gym=section)
    return EnvironmentSetup(environment, bounds, *told)
