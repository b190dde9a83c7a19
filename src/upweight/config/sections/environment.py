"""Keys about rollouts that act: tools, and the environment that answers to turns."""

from typing import Literal

from upweight.config.sections.model import PositiveInt
from upweight.settings import Section, setting

# Rewards that an environment gives itself, also by the path that another trainer has for them.
ENVIRONMENT_REWARDS = ("reward_env", "reward_nemo_gym_verify")
REWARD_MODULES = ("axolotl.integrations.nemo_gym.", "upweight.environments.")
ToolFormat = Literal["auto", "hermes", "llama3", "json"]


class EnvironmentSection(Section):
    """What a policy acts in."""

    tools: list[str] = setting(
        "tools", [], "Functions the policy may call, by dotted path; hints and docstring tell it how."
    )
    tool_format: ToolFormat = setting(
        "tool_format",
        "auto",
        "How calls are written: `<tool_call>` tags, Llama 3's, or bare JSON; auto goes by the chat template.",
    )
    kind: Literal["python", "openenv"] | None = setting(
        "environment.type", None, "A class of your own, or an OpenEnv server; tools alone when left out."
    )
    class_path: str | None = setting("environment.class", None, "The class, by dotted path: `file.Class`.")
    url: str | None = setting("environment.url", None, "Address of the server.")
    reward: Literal["sum", "last", "mean", "max"] = setting(
        "environment.reward", "sum", "What an OpenEnv episode earns, of the rewards of its steps."
    )
    columns: list[str] | None = setting(
        "environment.columns", None, "Columns handed to an OpenEnv `reset`; all but the prompt when left out."
    )
    text_field: str | None = setting(
        "environment.text_field", None, "Field of an OpenEnv action that takes the policy's text; the only one."
    )
    observation: str | None = setting(
        "environment.observation", None, "Field of an OpenEnv observation that the policy reads; all of them."
    )
    wait: float = setting("environment.wait", 300, "Seconds to wait for the server and for a free session.", gt=0)
    max_turns: PositiveInt = setting("environment.max_turns", 10, "Turns the policy may take in an episode.")
    timeout: float = setting("environment.timeout", 60, "Seconds one call of the environment may take.", gt=0)
    episode_timeout: float = setting(
        "environment.episode_timeout", 600, "Seconds an episode may spend in its environment altogether.", gt=0
    )
    tool_timeout: float = setting("environment.tool_timeout", 30, "Seconds one call of a tool may take.", gt=0)

    @property
    def acts(self) -> bool:
        """Whether something answers to the policy's turns."""
        return self.kind is not None or bool(self.tools)


def is_environment_reward(name: str) -> bool:
    """Whether an entry of `trl.reward_funcs` means what the environment itself says of an episode."""
    module, _, last = name.rpartition(".")
    return last in ENVIRONMENT_REWARDS and (not module or name.startswith(REWARD_MODULES))
