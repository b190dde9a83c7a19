"""The command line that starts a Gym, from folders that look like one."""

from pathlib import Path

import pytest
import yaml

from upweight.config.sections.rollout import GymDataset, GymSection
from upweight.environments.nemo_gym.process import (
    POLICY_MODEL,
    arguments,
    config_files,
    environment,
    find_gym,
    lacks_environments,
)
from upweight.errors import UserError

AGENT = {
    "resources_server": {"type": "resources_servers", "name": "sums"},
    "model_server": {"type": "responses_api_models", "name": "policy_model"},
}
SERVERS = {
    "sums": {"resources_servers": {"sums": {"entrypoint": "app.py"}}},
    "sums_agent": {"responses_api_agents": {"simple_agent": AGENT}},
}


def made(folder: Path, *, clone: bool = False) -> Path:
    """A folder with the Gym's program and one server."""
    home = folder / ".venv" if clone else folder
    root = folder if clone else folder / "lib" / "python3.12" / "site-packages"
    for place in (root / "resources_servers" / "sums", root / "responses_api_agents" / "simple_agent"):
        place.mkdir(parents=True)
    (root / POLICY_MODEL).parent.mkdir(parents=True)
    policy = {"policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py"}}}}
    (root / POLICY_MODEL).write_text(yaml.safe_dump(policy))
    (root / "resources_servers" / "sums" / "sums.yaml").write_text(yaml.safe_dump(SERVERS))
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "ng_run").touch()
    return folder


def test_an_environment_serves_all_servers(tmp_path):
    gym = GymSection(folder=str(made(tmp_path / "env")), config_paths=["resources_servers/sums/sums.yaml"], max_turns=3)
    installed = find_gym(gym.folder)
    files = config_files(gym, installed, tmp_path)
    assert not installed.is_clone
    assert not lacks_environments(installed, files)
    assert [Path(file).name for file in files] == ["sums.yaml", Path(POLICY_MODEL).name]  # the agent asks for a policy
    line = arguments(gym, installed, files, tmp_path / "work", ("http://127.0.0.1:5/v1", "tiny"))
    assert "++sums_agent.responses_api_agents.simple_agent.max_steps=3" in line
    assert "+policy_base_url=http://127.0.0.1:5/v1" in line
    assert "+head_server.port=11000" in line
    link = tmp_path / "work" / "servers" / "resources_servers" / "sums" / ".venv"
    assert link.resolve() == (tmp_path / "env").resolve()


def test_a_clone_keeps_the_environments_of_its_servers(tmp_path):
    gym = GymSection(folder=str(made(tmp_path / "Gym", clone=True)), config_paths=["resources_servers/sums/sums.yaml"])
    installed = find_gym(gym.folder)
    files = config_files(gym, installed, tmp_path)
    assert installed.is_clone
    assert lacks_environments(installed, files)
    assert not [one for one in arguments(gym, installed, files, tmp_path, ("u", "n")) if "uv_venv_dir" in one]
    for kind, name in (("resources_servers", "sums"), ("responses_api_agents", "simple_agent"),
                       ("responses_api_models", "vllm_model")):  # fmt: skip
        python = tmp_path / "Gym" / kind / name / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    assert not lacks_environments(installed, files)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="nemo_gym_auto_start: false"):
        find_gym(str(tmp_path))
    gym = GymSection(folder=str(made(tmp_path / "env")), config_paths=["nowhere.yaml"])
    with pytest.raises(UserError, match=r"there is no file nowhere.yaml"):
        config_files(gym, find_gym(gym.folder), tmp_path)


def config_of(root: Path, server: str, name: str, *, agent: bool, instance: str | None = None) -> str:
    """A config of the Gym for a server, with an agent or without."""
    file = root / "resources_servers" / server / "configs" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    instance = instance or server
    content = {instance: {"resources_servers": {server: {"entrypoint": "app.py"}}}}
    if agent:
        content[f"{instance}_agent"] = {"responses_api_agents": {"simple_agent": {"entrypoint": "app.py"}}}
    file.write_text(yaml.safe_dump(content))
    return str(file)


def derived(folder: Path, server: str, **keys) -> list[str]:
    gym = GymSection(folder=str(folder), datasets=[GymDataset(path="x", server_name=server)] * 2, **keys)
    return config_files(gym, find_gym(gym.folder), folder)


def test_configs_that_are_not_named_are_those_of_the_datasets_servers(tmp_path):
    folder = made(tmp_path / "env")
    root = find_gym(str(folder)).root
    whole = config_of(root, "words", "words.yaml", agent=True)
    plain = config_of(root, "words", "resources_only.yaml", agent=False)
    config_of(root, "words", "other_agent.yaml", agent=True)
    only = config_of(root, "counting", "some.yaml", agent=False, instance="counting_server")
    assert derived(folder, "words") == [plain]
    assert derived(folder, "words", multi_turn=True) == [whole]
    assert derived(folder, "counting") == derived(folder, "counting_server") == [only]
    assert derived(folder, "words_agent", multi_turn=True) == [whole]


def test_configs_that_cannot_be_chosen_are_listed(tmp_path):
    folder = made(tmp_path / "env")
    root = find_gym(str(folder)).root
    config_of(root, "words", "a.yaml", agent=False)
    config_of(root, "words", "b.yaml", agent=False)
    with pytest.raises(UserError, match=r"nemo_gym_config_paths.*resources_servers/words/configs/a.yaml, .*/b.yaml"):
        derived(folder, "words")
    with pytest.raises(UserError, match=r"no config of the Gym has an agent for 'words'.*upweight init gym"):
        derived(folder, "words", multi_turn=True)
    with pytest.raises(UserError, match="has a server 'nothing'"):
        derived(folder, "nothing")


def test_isolated_servers_are_told_no_keys(tmp_path):
    installed = find_gym(str(made(tmp_path / "env")))
    given = {"PATH": "/usr/bin", "HF_TOKEN": "secret", "WANDB_API_KEY": "secret", "HOME": "/home/me", "LANG": "C"}
    clean = environment(installed, tmp_path, given, clean=True)
    assert "secret" not in clean.values()
    assert clean["HOME"] == clean["RAY_TMPDIR"] == str(tmp_path)
    assert clean["LANG"] == "C"
    assert environment(installed, tmp_path, given, clean=False)["HF_TOKEN"] == "secret"
