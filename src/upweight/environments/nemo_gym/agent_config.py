"""The config of a Gym whose agents play rollouts: a resource server, a proxy to the policy, an agent."""

CONFIG = """\
# NeMo Gym: a server with tools and verification, a proxy to the policy, and the agent that drives the turns.
# Start it with: ng_run "+config_paths=[THIS_FILE]" "+skip_venv_if_present=true"
# or name this file in nemo_gym_config_paths and leave the start to `upweight train`.
# policy_base_url is not vLLM's address: the run listens here, and passes on to the version that is served.
policy_base_url: http://127.0.0.1:11001/v1
policy_api_key: EMPTY
policy_model_name: policy
INSTANCE:
  resources_servers:
    SERVER: {entrypoint: app.py, domain: agent}
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: ${policy_base_url}
      api_key: ${policy_api_key}
      model: ${policy_model_name}
      return_token_id_information: true
      uses_reasoning_parser: false
      replace_developer_role_with_system: true
INSTANCE_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: INSTANCE}
      model_server: {type: responses_api_models, name: policy_model}
      max_steps: MAX_TURNS
"""


def agent_config(server: str, *, instance: str | None = None, max_turns: int = 10) -> str:
    """YAML for the Gym; `server` is a folder of its `resources_servers`, `instance` the name it runs under."""
    text = CONFIG.replace("INSTANCE", instance or server).replace("SERVER", server)
    return text.replace("MAX_TURNS", str(max_turns))
