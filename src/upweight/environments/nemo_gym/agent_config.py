"""The config of a Gym whose agents play rollouts: a resource server, a proxy to the policy, an agent."""

from importlib.resources import files


def agent_config(server: str, *, instance: str | None = None, max_turns: int = 10) -> str:
    """YAML for the Gym; `server` is a folder of its `resources_servers`, `instance` the name it runs under."""
    text = files("upweight.environments.nemo_gym").joinpath("agent.yaml").read_text(encoding="utf-8")
    return text.replace("INSTANCE", instance or server).replace("SERVER", server).replace("MAX_TURNS", str(max_turns))
