"""The process between a run and the Gym's servers: takes rights away, starts them, and leaves nothing of them behind.

Started as `python -m upweight.environments.nemo_gym.launcher REQUEST` with a JSON request; it ends with its stdin, so
servers do not outlive the run however that ends. Light: little but the standard library.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from upweight.processes import process_ids, stat_of
from upweight.rewards.sandbox import launch as sandbox

NET, MOUNTS = 0x40000000, 0x00020000
PR_SET_CHILD_SUBREAPER = 36
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
HOST = re.compile(rb"^host:[^\r\n]*?:(\d+)\s*$", re.IGNORECASE | re.MULTILINE)
NOT_ISOLATED = 125
DOWN = b"HTTP/1.1 521 Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"  # nothing listens at the port


def enter(folder: str) -> list[str]:
    """Leave the network, and make all but `folder` read-only -> what holds; OSError where the system allows neither."""
    user, group = os.geteuid(), os.getegid()
    try:
        sandbox.checked(sandbox.LIBC.unshare(NET | MOUNTS), "unshare")
    except OSError:
        sandbox.checked(sandbox.LIBC.unshare(NET | MOUNTS | sandbox.USER_NAMESPACE), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    with contextlib.suppress(OSError):  # containers may forbid mounts; without a network is what counts
        sandbox.mount("none", "/", "", sandbox.MS_REC | sandbox.MS_PRIVATE)
        sandbox.mount(folder, folder, "", sandbox.MS_BIND | sandbox.MS_REC)
        read_only = sandbox.mount_attributes("/", sandbox.AT_RECURSIVE, on=sandbox.ATTR_RDONLY | sandbox.ATTR_NOSUID)
        if read_only and sandbox.mount_attributes(folder, off=sandbox.ATTR_RDONLY):
            sandbox.mount("tmpfs", "/dev/shm", "tmpfs", sandbox.MS_NOSUID | sandbox.MS_NODEV, "mode=1777")
            return ["without network", "on a read-only file system"]
    return ["without network"]


async def relay(path: str) -> None:
    """Pass connections on a socket in the file system on to the port that their first request names as its host."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (data := await reader.read(1 << 16)):
            head += data
        port = HOST.search(head.split(b"\r\n\r\n")[0])
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", int(port[1]) if port else 0)
        except OSError:
            writer.write(DOWN)
            writer.close()
            return
        inner_writer.write(head)
        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))

    async with await asyncio.start_unix_server(serve, path, limit=1 << 20) as server:
        await server.serve_forever()


def descendants() -> set[int]:
    """Processes that stem from this one, also those whose parents are gone: they were handed to it."""
    parents = {process: stat_of(process)[1] for process in process_ids()}
    processes = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in processes and child not in processes}:
        processes |= more
    return processes - {os.getpid()}


def run(request: dict) -> int:
    """Start the servers and wait: for their end, for a signal, or for the end of stdin."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    # Started by the main thread, before others run, with signals as a fresh program has them.
    child = subprocess.Popen(
        request["argv"], env=request["env"], cwd=request["cwd"], stdin=subprocess.DEVNULL, start_new_session=True
    )
    if request["socket"]:
        threading.Thread(target=lambda: asyncio.run(relay(request["socket"])), daemon=True).start()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), stop.set()), daemon=True).start()
    while child.poll() is None and not stop.wait(0.2):
        pass
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(request["grace"])
    for _ in range(20):
        remaining = descendants() if sandbox.LINUX else {child.pid}
        for process in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not remaining:
            break
        time.sleep(0.05)
    return child.returncode or 0


def main() -> None:
    """Isolate where it is asked for, then run."""
    request = json.loads(sys.argv[1])
    if sandbox.LINUX:
        sandbox.LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if request["isolated"]:
        try:
            holds = enter(request["folder"])
        except OSError as error:
            print(f"upweight: cannot isolate: {error}", flush=True)
            sys.exit(NOT_ISOLATED)
        print(f"upweight: {' and '.join(holds)}", flush=True)
    code = run(request)
    shutil.rmtree(request["folder"], ignore_errors=True)
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
