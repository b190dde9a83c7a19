"""Keys about tools and environments in multi-turn rollouts."""

from typing import Literal

from upweight.settings import PositiveInt, Section, setting

# Names of rewards that come from the environment, also by their module path in Axolotl.
ENVIRONMENT_REWARDS = ("reward_env", "reward_nemo_gym_verify")
REWARD_MODULES = ("axolotl.integrations.nemo_gym.", "upweight.environments.")
ToolFormat = Literal["auto", "hermes", "llama3", "json"]


class EnvironmentSection(Section):
    """The tools and the environment of a policy."""

    tools: list[str] = setting("tools", [], "Functions the policy may call, by dotted path; docstrings describe them.")
    tool_format: ToolFormat = setting(
        "tool_format",
        "auto",
        "How tool calls are written: `<tool_call>` tags (hermes), Llama 3's, JSON; auto: by the template.",
    )
    kind: Literal["python", "openenv"] | None = setting(
        "environment.type", None, "A Python class, or an OpenEnv server; without it, only `tools` are used."
    )
    class_path: str | None = setting("environment.class", None, "Dotted path of the environment class: `file.Class`.")
    url: str | None = setting("environment.url", None, "URL of the OpenEnv server.")
    reward: Literal["sum", "last", "mean", "max"] = setting(
        "environment.reward", "sum", "How the step rewards of an OpenEnv episode are combined."
    )
    columns: list[str] | None = setting(
        "environment.columns", None, "Columns passed to OpenEnv's `reset`. When left out: all but the prompt."
    )
    text_field: str | None = setting(
        "environment.text_field", None, "OpenEnv: field of the action that takes the text. When left out: the only one."
    )
    observation: str | None = setting(
        "environment.observation", None, "OpenEnv: field of the observation that the policy sees. When left out: all."
    )
    image: str | None = setting(
        "environment.image", None, "OpenEnv: field of the observation that holds an image, which the policy sees too."
    )
    wait: float = setting("environment.wait", 300, "Seconds to wait for the server and for a free session.", gt=0)
    max_turns: PositiveInt = setting("environment.max_turns", 10, "Most turns of the policy in an episode.")
    timeout: float = setting("environment.timeout", 60, "Longest time of one environment call, in seconds.", gt=0)
    episode_timeout: float = setting("environment.episode_timeout", 600, "Seconds for all calls of an episode.", gt=0)
    tool_timeout: float = setting("environment.tool_timeout", 30, "Longest time of one tool call, in seconds.", gt=0)

    @property
    def acts(self) -> bool:
        """Whether the rollouts use tools or an environment."""
        return self.kind is not None or bool(self.tools)


def is_environment_reward(name: str) -> bool:
    """Whether an entry of `trl.reward_funcs` names the reward of the environment."""
    module, _, last = name.rpartition(".")
    return last in ENVIRONMENT_REWARDS and (not module or name.startswith(REWARD_MODULES))
