"""Launch a command as several ranks, on one machine or as one node of several, and end them together."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.files import write_text
from upweight.processes import end_with_parent, forwarded_signals, free_port, stat_of
from upweight.runs.command import resume_words

PORT = 29500  # default rendezvous port of several machines
MESSAGE_FOLDER = "UPWEIGHT_LAUNCHER"  # folder where a rank writes an error for the launcher to print
POLL_SECONDS = 0.1
STOPPED_SECONDS = 30.0  # that a rank may be stopped, while the others wait for it
LAUNCHERS = ("torchrun", "accelerate", "none")


def is_rank() -> bool:
    """Whether a launcher, ours or another, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class Start:
    """How ranks are started; `extra` arguments go to torchrun or accelerate."""

    nproc_per_node: int | None = None  # on this machine; None: one for each GPU
    launcher: str | None = None  # one of `LAUNCHERS`; None: ours
    nodes: int = 1
    node_rank: int = 0
    address: str | None = None  # of the first node
    port: int | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.launcher not in (None, *LAUNCHERS):
            raise UserError(f"--launcher {self.launcher}: is one of {', '.join(LAUNCHERS)}.")
        if self.nodes > 1 and self.address is None:
            raise UserError("--nodes: the ranks of several machines need a place to meet; add --master-address.")
        if self.node_rank >= self.nodes:
            raise UserError(f"--node-rank {self.node_rank}: counts from 0 and has to be below --nodes {self.nodes}.")
        if self.extra and self.launcher not in ("torchrun", "accelerate"):
            raise UserError("arguments after -- are for --launcher torchrun or accelerate; name one of them.")
        if self.launcher == "none" and (self.nodes > 1 or (self.nproc_per_node or 1) > 1):
            raise UserError("--launcher none starts no processes; drop it, or --nodes and --num-processes.")

    def options(self) -> list[str]:
        """Return the options of the command that start ranks in this way, without `extra`."""
        given = {
            "--num-processes": self.nproc_per_node,
            "--launcher": self.launcher,
            "--nodes": self.nodes if self.nodes > 1 else None,
            "--node-rank": self.node_rank or None,
            "--master-address": self.address,
            "--master-port": self.port,
        }
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def launch(arguments: Sequence[str], start: Start, nproc_per_node: int) -> int:
    """Run `upweight ARGUMENTS` as `nproc_per_node` ranks; return the exit code, and print errors once."""
    with tempfile.TemporaryDirectory() as folder:
        port, store = start.port or (PORT if start.nodes > 1 else free_port()), None
        if start.launcher is None:
            command = [sys.executable, "-m", "upweight", *arguments]
            listener = _listen(start.port or 0) if start.nodes == 1 else None
            alone = {} if listener is None else _at_loopback(listener)
            each = [_rank_variables(start, number, nproc_per_node, port) | alone for number in range(nproc_per_node)]
            ranks = [_spawn(command, folder, variables) for variables in each]
            store = listener and _store_at(listener)  # which ranks need while they run
        else:
            import torch

            on_cpu = start.launcher == "accelerate" and not torch.cuda.is_available()  # which its launcher must be told
            variables = {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
            ranks = [_spawn(_launcher_command(arguments, start, nproc_per_node, port), folder, variables)]
        with forwarded_signals((signal.SIGTERM, signal.SIGINT), ranks) as passed:
            try:
                return _wait_for_ranks(ranks, Path(folder), passed)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
                del store


def has_launcher() -> bool:
    """Return whether `launch` started this process; it has shown what the config alone says."""
    return MESSAGE_FOLDER in os.environ


def say_through_launcher(text: str) -> None:
    """Write an error for the launcher, which ends all ranks and prints it once; without it, do nothing."""
    folder = os.environ.get(MESSAGE_FOLDER)
    if folder is None:
        return
    write_text(Path(folder) / f"{os.environ['RANK']}.txt", text)
    time.sleep(60)  # exiting now would make the other ranks report a lost connection


def end_with_launcher() -> None:
    """End this rank when the launcher that started it is gone."""
    if has_launcher():
        end_with_parent()


def _at_loopback(listener: socket.socket) -> dict[str, str]:
    """Return variables by which the ranks of one machine meet at the launcher's store and listen on loopback alone."""
    # By itself, torch would have rank 0 open a store on all interfaces.
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    names = [] if loopback is None else ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    store = {"MASTER_PORT": str(listener.getsockname()[1]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return store | {name: os.environ.get(name, str(loopback)) for name in names}


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UserError(f"--master-port {port}: {error.strerror}. Name another, or leave it out.") from error


def _store_at(listener: socket.socket) -> Any:
    """Open the store at which ranks meet, on a socket that listens already."""
    import torch.distributed as dist

    address, port = listener.getsockname()
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(address, port, **options)  # pyright: ignore[reportPrivateImportUsage]


def _rank_variables(start: Start, rank: int, nproc_per_node: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(start.node_rank * nproc_per_node + rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(start.nodes * nproc_per_node),
        "LOCAL_WORLD_SIZE": str(nproc_per_node),
        "MASTER_ADDR": (start.nodes > 1 and start.address) or "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // nproc_per_node, 1))),
    }


def _spawn(command: Sequence[str], folder: str, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: the terminal's Ctrl-C would reach it twice.
    return subprocess.Popen(command, env={**os.environ, MESSAGE_FOLDER: folder, **variables}, start_new_session=True)


def _launcher_command(arguments: Sequence[str], start: Start, nproc_per_node: int, port: int) -> list[str]:
    """The command line of torchrun or accelerate; arguments after -- come last and win."""
    command, address = ["-m", "upweight", *arguments], start.address or "127.0.0.1"
    if start.launcher == "torchrun":
        where = ["--nnodes", str(start.nodes), "--node-rank", str(start.node_rank)]
        where += ["--nproc-per-node", str(nproc_per_node), "--master-addr", address, "--master-port", str(port)]
        return [sys.executable, "-m", "torch.distributed.run", *where, *start.extra, *command]
    where = ["--num_machines", str(start.nodes), "--machine_rank", str(start.node_rank)]
    where += ["--num_processes", str(start.nodes * nproc_per_node), "--main_process_ip", address]
    where += ["--main_process_port", str(port), "--mixed_precision", "no", "--dynamo_backend", "no"]
    # Also on CPUs, where it would start one process.
    several = ["--multi_gpu"] if start.nodes * nproc_per_node > 1 else []
    return [sys.executable, "-m", "accelerate.commands.launch", *where, *several, *start.extra, *command]


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, passed: list[int]) -> int:
    """Wait until all are done, one has failed, or one has been stopped for long."""
    running = time.monotonic()  # when all ranks were last seen to run
    while True:
        messages = sorted(folder.glob("*.txt"))
        if messages:
            print(messages[0].read_text(encoding="utf-8"), file=sys.stderr)
            return 2
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        # After a signal, all ranks save together; wait for each of them.
        if failed and (not passed or None not in codes):
            if not passed:
                print(_failure_message(codes), file=sys.stderr)
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        stopped = [number for number, rank in enumerate(ranks) if stat_of(rank.pid)[0] == "T"]
        if not stopped:
            running = time.monotonic()
        elif time.monotonic() - running > STOPPED_SECONDS:
            who = f"process {stopped[0]} of {len(ranks)}"
            print(f"{who} was stopped (SIGSTOP), and the run with it; {_go_on()}", file=sys.stderr)
            return 1
        time.sleep(POLL_SECONDS)


def _go_on() -> str:
    return f"go on from its last checkpoint with {resume_words()}"


def _failure_message(codes: Sequence[int | None]) -> str:
    """Return which rank failed and how to resume; a killed rank is named before those that lost connection to it."""
    rank = min((n for n, code in enumerate(codes) if code), key=lambda n: codes[n] or 0)
    code = codes[rank] or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    memory = " (out of host memory?)" if code == -signal.SIGKILL else ""
    who = f"process {rank} of {len(codes)}" if len(codes) > 1 else "the launcher"
    return f"{who} {how}{memory}, and the run with it; {_go_on()}"
