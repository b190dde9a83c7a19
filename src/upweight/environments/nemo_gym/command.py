"""From a config to the command line that starts the Gym's servers."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from upweight.config.sections.rollout import GymSection
from upweight.environments.nemo_gym.servers import AGENTS, MODELS, RESOURCES
from upweight.errors import UserError

PROGRAM = "ng_run"
KINDS = (RESOURCES, AGENTS, MODELS)
POLICY_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
# What a server needs to know of the world; keys, tokens and addresses stay here.
KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL", "TERM", "LD_LIBRARY_PATH", "PYENV_ROOT")


@dataclass(frozen=True)
class Installed:
    """Where the Gym is: its program, the folder that holds its servers, and whether each has an environment there."""

    program: Path
    root: Path
    is_clone: bool


def find_gym(folder: str) -> Installed:
    """The Gym in a clone or an environment, else the one that is installed where programs are looked for."""
    place = Path(os.path.expanduser(folder))
    found = next((file for file in (place / ".venv/bin" / PROGRAM, place / "bin" / PROGRAM) if file.is_file()), None)
    if found is not None and found.parent.parent.name == ".venv" and (place / RESOURCES).is_dir():
        return Installed(found.absolute(), place.resolve(), is_clone=True)
    if found is None:
        beside = shutil.which(PROGRAM)
        if beside is None:
            raise UserError(
                f"nemo_gym_dir: neither {place} nor PATH has '{PROGRAM}'. Install the Gym (pip install nemo-gym==0.4.0 "
                "in an environment of Python 3.12) and name the environment's folder, or set 'nemo_gym_auto_start: "
                "false' and start it yourself."
            )
        found = Path(beside)
    roots = [path for path in found.parent.parent.glob("lib/python3*/site-packages") if (path / RESOURCES).is_dir()]
    if not roots:
        raise UserError(f"nemo_gym_dir: {found} belongs to a Gym without servers; use nemo-gym 0.4.0 or later.")
    return Installed(found.absolute(), roots[0], is_clone=False)


def config_files(gym: GymSection, installed: Installed, folder: Path) -> list[str]:
    """`nemo_gym_config_paths` as the Gym finds them, with a proxy for the policy where agents ask for one."""
    files = []
    for path in gym.config_paths:
        wide = Path(os.path.expanduser(path))
        places = (wide, folder / wide, installed.root / wide)
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            tried = ", ".join(str(place) for place in places)
            raise UserError(f"nemo_gym_config_paths: there is no file {path}. Tried {tried}.")
        files.append(str(file.resolve()))
    servers = [one for file in files for one in _servers(file)]
    wanted = {server["model_server"]["name"] for *_, server in servers if "model_server" in server}
    if "policy_model" in wanted - {instance for instance, *_ in servers}:
        files.append(str(installed.root / POLICY_MODEL))
    return files


def agent_limits(files: Sequence[str], max_turns: int | None) -> list[str]:
    """Arguments that bound the turns of every agent that takes a bound."""
    found = [(instance, name) for file in files for instance, kind, name, _ in _servers(file) if kind == AGENTS]
    return [
        f"++{instance}.{AGENTS}.{name}.max_steps={max_turns}"
        for instance, name in found
        if max_turns is not None and name == "simple_agent"
    ]


def lacks_environments(installed: Installed, files: Sequence[str]) -> bool:
    """Whether the Gym would have to fetch packages before its servers start."""
    places = [installed.root / kind / name for file in files for _, kind, name, _ in _servers(file)]
    return installed.is_clone and not all((place / ".venv/bin/python").exists() for place in places)


def arguments(
    gym: GymSection, installed: Installed, files: Sequence[str], folder: Path, policy: tuple[str, str]
) -> list[str]:
    """The command line; `folder` is for what the Gym writes, `policy` the address and name of the model."""
    shared = [] if installed.is_clone else [f"+uv_venv_dir={_one_environment(installed, folder / 'servers')}"]
    url, name = policy
    return [
        str(installed.program),
        f"+config_paths=[{','.join(files)}]",
        "+skip_venv_if_present=true",
        "+head_server.host=127.0.0.1",
        f"+head_server.port={gym.head_port}",
        f"+policy_base_url={url}",
        "+policy_api_key=EMPTY",
        f"+policy_model_name={name}",
        "+model_endpoint_readiness_timeout_seconds=0",
        f"hydra.run.dir={folder / 'hydra'}",
        *shared,
        *agent_limits(files, gym.max_turns),
    ]


def environment(installed: Installed, folder: Path, given: Mapping[str, str], *, clean: bool) -> dict[str, str]:
    """The variables of the servers; `clean`: without what they have no use for, such as keys."""
    kept = {name: value for name, value in given.items() if name in KEPT} if clean else dict(given)
    kept |= {"RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    if clean:
        kept |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"}
    kept["PATH"] = os.pathsep.join([str(installed.program.parent), kept.get("PATH", os.defpath)])
    return kept


def _one_environment(installed: Installed, folder: Path) -> Path:
    """A folder in which every server finds the environment that the Gym itself is installed in."""
    home = installed.program.parent.parent
    for kind in KINDS:
        for server in (installed.root / kind).iterdir():
            link = folder / kind / server.name / ".venv"
            if server.is_dir() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(home)
    return folder


def _servers(file: str) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(instance, kind, implementation, settings) of every server that a config of the Gym describes."""
    content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    for instance, kinds in content.items():
        for kind, implementations in kinds.items() if isinstance(kinds, Mapping) else ():
            if kind in KINDS and isinstance(implementations, Mapping):
                for name, settings in implementations.items():
                    yield instance, kind, name, settings or {}
