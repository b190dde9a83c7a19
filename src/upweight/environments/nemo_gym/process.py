"""The Gym's servers as a child process: which configs and command line start them, their end and their log."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml

from upweight.config.sections.rollout import GymSection
from upweight.environments.nemo_gym.servers import AGENTS, MODELS, RESOURCES
from upweight.errors import UserError
from upweight.log import logger

PROGRAM = "ng_run"
KINDS = (RESOURCES, AGENTS, MODELS)
POLICY_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
# Environment variables that servers may see; keys, tokens and addresses are kept from them.
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL", "TERM", "LD_LIBRARY_PATH", "PYENV_ROOT")
GRACE_SECONDS = 20.0  # seconds in which servers may end by themselves
LOG, SOCKET = "nemo_gym.log", "socket"
NO_POLICY = ("http://127.0.0.1:9/v1", "policy")  # agents that nobody asks need not reach it


class GymProcess:
    """Servers, which run what the policy wrote: isolated where possible, in a process group that ends with this one."""

    def __init__(self, gym: GymSection, folder: Path, log_folder: Path, *, policy: tuple[str, str] | None) -> None:
        """`folder` is the config's. `policy`: address and name of the model, which agents have to reach."""
        installed = find_gym(gym.folder)
        files = config_files(gym, installed, folder)
        needs = "agents reach vLLM over it" if policy else "packages have to be fetched"
        reachable = policy is not None or lacks_environments(installed, files)
        if gym.isolate and reachable:
            raise UserError(f"nemo_gym_isolate: the servers need a network: {needs}. Drop the key.")
        # Short: sockets in it have names of limited length. Not in the run's folder: that may be on a shared disk.
        self._work = Path(tempfile.gettempdir(), f"upw-gym-{uuid.uuid4().hex[:8]}")
        self._isolated = gym.isolate is not False and not reachable and _can_isolate()
        if gym.isolate and not self._isolated:
            raise UserError("nemo_gym_isolate: the system allows no namespaces here. Drop the key.")
        if gym.isolate is None and not self._isolated:
            logger.warning(
                "warning: the Gym's servers run with the network and the rights of this user, and run what the policy "
                "writes: %s", needs if reachable else "the system allows no namespaces"
            )  # fmt: skip
        self._command = partial(arguments, gym, installed, files, self._work, policy or NO_POLICY)
        self._cwd = installed.root if installed.is_clone else self._work
        self._installed = installed
        self.log = log_folder / LOG
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uds(self) -> str | None:
        """The file through which servers without a network are reached."""
        return str(self._work / SOCKET) if self._isolated else None

    def spawn(self) -> None:
        """Start the servers; they need a while until they answer."""
        self._work.mkdir(mode=0o700, exist_ok=True)
        (self._work / SOCKET).unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "ab") as log:
            env = environment(self._installed, self._work, os.environ, clean=self._isolated)
            self._process = _launch(self._command(), env, self._cwd, self._work, isolated=self._isolated, output=log)

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def end(self) -> None:
        """End the servers by SIGINT, and kill them after a while."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.communicate(timeout=GRACE_SECONDS + 15)  # closes stdin, which is the signal to end
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def remove(self) -> None:
        """Remove the files of the servers, except the log."""
        shutil.rmtree(self._work, ignore_errors=True)

    def last_log_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")[:300]


def _can_isolate() -> bool:
    """Whether the system lets a process leave the network."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "ab") as nothing:
        path, command = Path(folder), [sys.executable, "-c", ""]
        tried = _launch(command, dict(os.environ), path, path, isolated=True, output=nothing)
        return tried.wait() == 0


def _launch(
    argv: list[str], variables: dict[str, str], cwd: Path, work: Path, *, isolated: bool, output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """A program under the launcher, which ends it when its stdin is closed."""
    program = {"argv": argv, "env": variables, "cwd": str(cwd), "grace": GRACE_SECONDS}
    sandbox = {"folder": str(work), "isolated": isolated, "socket": str(work / SOCKET) if isolated else None}
    command = [sys.executable, "-m", "upweight.environments.nemo_gym.launcher", json.dumps(program | sandbox)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


@dataclass(frozen=True)
class Installed:
    """An installed Gym: its program, the folder of its servers, and whether it is a clone with a venv per server."""

    program: Path
    root: Path
    is_clone: bool


def find_gym(folder: str) -> Installed:
    """The Gym in a clone or a virtual environment, otherwise the one on PATH."""
    root = Path(os.path.expanduser(folder))
    program = next((file for file in (root / ".venv/bin" / PROGRAM, root / "bin" / PROGRAM) if file.is_file()), None)
    if program is not None and program.parent.parent.name == ".venv" and (root / RESOURCES).is_dir():
        return Installed(program.absolute(), root.resolve(), is_clone=True)
    if program is None:
        on_path = shutil.which(PROGRAM)
        if on_path is None:
            raise UserError(
                f"nemo_gym_dir: neither {root} nor PATH has '{PROGRAM}'. Install the Gym (pip install nemo-gym==0.4.0 "
                "in an environment of Python 3.12) and name the environment's folder, or set 'nemo_gym_auto_start: "
                "false' and start it yourself."
            )
        program = Path(on_path)
    roots = [path for path in program.parent.parent.glob("lib/python3*/site-packages") if (path / RESOURCES).is_dir()]
    if not roots:
        raise UserError(f"nemo_gym_dir: {program} belongs to a Gym without servers; use nemo-gym 0.4.0 or later.")
    return Installed(program.absolute(), roots[0], is_clone=False)


def config_files(gym: GymSection, installed: Installed, folder: Path) -> list[str]:
    """`nemo_gym_config_paths`, or the configs of the datasets' servers; with a proxy where agents need the policy."""
    files: list[str] = []
    if not gym.config_paths:
        names = dict.fromkeys(dataset.server_name for dataset in gym.datasets if dataset.server_name is not None)
        derived = dict.fromkeys(_config_of(name, installed.root, agents=gym.multi_turn) for name in names)
        logger.info("NeMo Gym: nemo_gym_config_paths: [%s]", ", ".join(derived))
        files = [str(installed.root / file) for file in derived]
    for path in gym.config_paths:
        wide = Path(os.path.expanduser(path))
        candidates = (wide, folder / wide, installed.root / wide)
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            tried = ", ".join(str(candidate) for candidate in candidates)
            raise UserError(f"nemo_gym_config_paths: there is no file {path}. Tried {tried}.")
        files.append(str(file.resolve()))
    servers = [server for file in files for server in _servers_of_config(file)]
    wanted = {server["model_server"]["name"] for *_, server in servers if "model_server" in server}
    if "policy_model" in wanted - {instance for instance, *_ in servers}:
        files.append(str(installed.root / POLICY_MODEL))
    return files


def _config_of(name: str, root: Path, *, agents: bool) -> str:
    """The config below `root` that starts the server of a name, and an agent for it where `agents` are needed."""
    folder = name if (root / RESOURCES / name).is_dir() else "*"
    with_agent: dict[str, bool] = {}  # of the configs that have the server
    for file in sorted((root / RESOURCES).glob(f"{folder}/configs/*.yaml")):
        servers = list(_servers_of_config(file))
        if any(name == instance or (name, RESOURCES) == (server, kind) for instance, kind, server, _ in servers):
            with_agent[str(file.relative_to(root))] = any(kind == AGENTS for _, kind, *_ in servers)
    configs = [path for path, has_agent in with_agent.items() if has_agent or not agents]
    main = ("{}.yaml", "simple_agent.yaml") if agents else ("resources_only.yaml", "{}.yaml")
    preferred = [path for form in main for path in configs if Path(path).name == form.format(Path(path).parts[1])]
    if preferred or len(configs) == 1:
        return (preferred or configs)[0]
    key = "nemo_gym_config_paths: missing, and"
    if configs:
        raise UserError(f"{key} several configs of the Gym start '{name}'. Name one of {', '.join(configs)}.")
    if with_agent:
        raise UserError(
            f"{key} no config of the Gym has an agent for '{name}', which nemo_gym_multi_turn needs. `upweight init "
            f"gym` writes one (gym.yaml): name it. Or drop nemo_gym_multi_turn: {next(iter(with_agent))} is enough."
        )
    raise UserError(f"{key} no config in {root / RESOURCES} has a server '{name}'. Name the file that has it.")


def lacks_environments(installed: Installed, files: Sequence[str]) -> bool:
    """Whether the Gym would have to fetch packages before its servers start."""
    folders = [installed.root / kind / name for file in files for _, kind, name, _ in _servers_of_config(file)]
    return installed.is_clone and not all((folder / ".venv/bin/python").exists() for folder in folders)


def arguments(
    gym: GymSection, installed: Installed, files: Sequence[str], folder: Path, policy: tuple[str, str]
) -> list[str]:
    """The command line; the Gym writes into `folder`, and `policy` is the address and name of the model."""
    url, name = policy
    line = [
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
    ]
    if not installed.is_clone:
        line.append(f"+uv_venv_dir={_shared_environments(installed, folder / 'servers')}")
    for instance, kind, agent, _ in (server for file in files for server in _servers_of_config(file)):
        if gym.max_turns is not None and kind == AGENTS and agent == "simple_agent":
            line.append(f"++{instance}.{AGENTS}.{agent}.max_steps={gym.max_turns}")
    return line


def environment(installed: Installed, folder: Path, variables: Mapping[str, str], *, clean: bool) -> dict[str, str]:
    """The servers' environment variables; `clean` drops those they do not need, such as API keys."""
    kept = {name: value for name, value in variables.items() if name in KEPT_VARIABLES} if clean else dict(variables)
    kept |= {"RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    if clean:
        kept |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "*"}
    kept["PATH"] = os.pathsep.join([str(installed.program.parent), kept.get("PATH", os.defpath)])
    return kept


def _shared_environments(installed: Installed, folder: Path) -> Path:
    """A folder that links every server to the virtual environment in which the Gym itself is installed."""
    home = installed.program.parent.parent
    for kind in KINDS:
        for server in (installed.root / kind).iterdir():
            link = folder / kind / server.name / ".venv"
            if server.is_dir() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(home)
    return folder


def _servers_of_config(file: str | Path) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """(instance, kind, implementation, settings) of every server that a config of the Gym describes."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except yaml.YAMLError:  # the Gym says what is wrong with a config that it is to start
        return
    for instance, kinds in content.items() if isinstance(content, Mapping) else ():
        for kind, implementations in kinds.items() if isinstance(kinds, Mapping) else ():
            if kind in KINDS and isinstance(implementations, Mapping):
                for name, settings in implementations.items():
                    yield instance, kind, name, settings or {}
