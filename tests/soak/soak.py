"""A long online run with everything on; memory, descriptors, threads, processes and disk have to stay flat.

`soak.py [--steps 2000] [--in-process]` prints what each tenth of the run used at most, and exits with 1 where something
grew. It reads /proc, so it needs Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml
from transformers.utils.logging import disable_progress_bar

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # of a script that is its own folder, where `soak` is this file

from made_runs import CONTEXT, write_model, write_online
from made_vllm import FakeVllm
from upweight.runs.checkpoints import checkpoints_of

PARTS = 10
KEPT = 2  # checkpoints
LOGS = ("metrics.jsonl", "completions", "trainer_state.json")  # files and folders; the last holds all logs of a run
ONLINE = {
    "num_generations": 4, "max_completion_length": 6, "async_prefetch": True, "reward_num_workers": 2,
    "replay_buffer_size": 16, "importance_sampling_level": "token",
}  # fmt: skip
SERVER = {"use_vllm": True, "vllm_sync_interval": 2, "vllm_server_timeout": 120}
# What may be added between the second fifth of a run, by when everything has been used once, and its last fifth.
BOUNDS = {"main_mb": 12.0, "workers_mb": 8.0, "descriptors": 2, "threads": 1, "processes": 0, "disk_mb": 0.5}


def soak(folder: Path, steps: int, *, server: bool = True) -> list[dict[str, float]]:
    """Train for so many steps in `folder`, and return what each tenth of the run used at most."""
    model = write_model(folder / "model")
    every, logged = (
        max(steps // 50, 5),
        max(steps // 200, 1),
    )  # every log stays in memory, about 10 KB each
    file = write_online(folder, model, max_steps=steps, val_set_size=2, eval_steps=every, save_steps=every,
                        save_total_limit=KEPT, logging_steps=logged)  # fmt: skip
    content = yaml.safe_load(file.read_text())
    content["trl"] |= ONLINE
    ended = CONTEXT.Event()
    if server:
        here, there = CONTEXT.Pipe()
        CONTEXT.Process(target=_serve, args=(model, there, ended), daemon=True).start()
        content["trl"] |= SERVER | {"vllm_server_base_url": here.recv()}
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "upweight", "train", str(file), "--quiet"]
    with (folder / "said").open("w") as said:
        (folder / "tmp").mkdir()
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | {"TMPDIR": str(folder / "tmp")})
    try:
        seen = _watch(process, folder / "out")
    finally:
        process.kill()
        process.wait()
        ended.set()
    assert process.returncode == 0, (folder / "said").read_text()
    assert seen[-1]["step"] > 0.9 * steps, seen[-1]
    parts = [[one for one in seen if n * steps <= PARTS * (one["step"] - 1) < (n + 1) * steps] for n in range(PARTS)]
    return [{name: max(one[name] for one in part) for name in part[0]} for part in parts if part]


def grown(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return what grew beyond its bound, and by how much."""
    early, late = ({name: max(one[name] for one in some) for name in BOUNDS} for some in (parts[2:4], parts[-2:]))
    return {name: late[name] - early[name] for name, most in BOUNDS.items() if late[name] - early[name] > most}


def _serve(model: Path, place, ended) -> None:
    disable_progress_bar()
    fake = FakeVllm(model)
    fake.requests = _Nothing()
    place.send(fake.url)
    parent = os.getppid()
    while not ended.wait(1) and os.getppid() == parent:
        pass
    fake.close()


class _Nothing(list):
    """A list that keeps nothing: what the stand-in of a server was asked is of no use here."""

    def append(self, _):
        pass


def _watch(process: subprocess.Popen, out: Path) -> list[dict[str, float]]:
    """What the run uses, looked at several times a second until it ends."""
    seen: list[dict[str, float]] = []
    pause = threading.Event()
    while process.poll() is None:
        pause.wait(0.3)
        try:
            seen += [one] if (one := _use(process.pid, out)) else []
        except (OSError, ValueError, LookupError):  # it ended, or a file was renamed, while it was looked at
            continue
    return seen


def _use(pid: int, out: Path) -> dict[str, float] | None:
    """What a run and its children use now; None before its first step."""
    metrics = out / "metrics.jsonl"
    if not metrics.exists():
        return None
    lines = metrics.read_text().splitlines()
    children = _children(pid)
    kept = len(checkpoints_of(out))
    assert kept <= KEPT + 1, f"{kept} checkpoints"  # one more while it is written
    return {
        "step": json.loads(lines[-1])["step"],
        "main_mb": _anonymous(pid),
        "workers_mb": sum(map(_anonymous, children)),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "processes": len(children),
        "checkpoints": kept,
        "disk_mb": _size(out, logs=False) + _size(out.parent / "tmp", logs=False),
        "logs_mb": _size(out, logs=True),
    }


def _children(pid: int) -> list[int]:
    threads = os.listdir(f"/proc/{pid}/task")
    return [int(one) for n in threads for one in Path(f"/proc/{pid}/task/{n}/children").read_text().split()]


def _anonymous(pid: int) -> float:
    """Memory of a process in MB that is neither shared nor that of files."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def _size(folder: Path, *, logs: bool) -> float:
    """MB of the folders in a folder without logs, which grow with every step; or of the logs alone."""
    files = [path for path in folder.rglob("*") if path.is_file() and (logs or path.parent != folder)]
    return sum(path.stat().st_size for path in files if (path.name in LOGS or path.parent.name in LOGS) == logs) / 2**20


def main() -> None:
    """Run it in a folder that is removed afterwards, and print its parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--in-process", action="store_true", help="sample in process, instead of from a server beside")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        parts = soak(Path(folder), arguments.steps, server=not arguments.in_process)
    for part in parts:
        print(json.dumps({name: round(value, 1) for name, value in part.items()}))
    more = grown(parts)
    print(f"{time.monotonic() - began:.0f} s; grown: {more or 'nothing'}")
    sys.exit(bool(more))


if __name__ == "__main__":
    main()
