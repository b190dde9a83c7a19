"""Hostile programs: each ends, takes nothing with it, and leaves nothing behind."""

import ctypes
import os
import platform
import signal
import socket
import time
from functools import cache
from pathlib import Path

import pytest

from upweight.rewards.sandbox.run import Limits, SandboxError, run_program

QUICK = Limits(seconds=3.0, memory_bytes=256 * 2**20, processes=8)


@cache
def allowed(way: str) -> str:
    try:
        run_program("pass", tests=None, stdin="", limits=Limits(seconds=30), ways=(way,))
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(params=["root", "user", "plain"])
def way(request):
    refused = allowed(request.param)
    if refused:
        pytest.skip(f"this system does not isolate by '{request.param}': {refused}")
    return request.param


def run(code, way, tests=None, stdin="", limits=QUICK):
    return run_program(code, tests=tests, stdin=stdin, limits=limits, ways=(way,))


def running(word: str) -> list[str]:
    """The living processes with a word in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if word.encode() in text:
            found.append(folder.name)
    return found


def test_some_way_is_allowed_or_all_are_refused():
    outcome = None
    try:
        outcome = run_program("print(1)", tests=None, stdin="", limits=Limits(seconds=30))
    except SandboxError:
        assert all(allowed(way) for way in ("root", "user", "plain"))
    assert outcome is None or outcome.stdout == "1\n"


def test_output_stdin_and_exit(way):
    outcome = run("print(int(input()) + 1)", way, stdin="41\n")
    assert (outcome.stdout, outcome.ended_well) == ("42\n", True)
    assert not run("raise SystemExit(3)", way).ended_well
    assert run("import sys; sys.exit(0)", way).ended_well
    failed = run("1/0", way)
    assert not failed.ended_well
    assert "ZeroDivisionError" in failed.reason


def test_tests_see_the_program(way):
    outcome = run("def f(x):\n    return x + 1", way, tests=["assert f(1) == 2", "assert f(1) == 3", "exit()", "f(2)"])
    assert outcome.held == [True, False, False, True]


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "import os; os._exit(0)", "quit()", "def f(:", "\x00"])
def test_leaving_early_passes_no_test(way, code):
    assert run(code, way, tests=["pass"]).held is None


@pytest.mark.parametrize("report", ['b\'{"token": "guess", "held": [true]}\\n\'', "b'[' * 5000 + b'\\n'"])
def test_a_forged_report_is_not_believed(way, report):
    code = f"""
import os
for fd in range(3, 64):
    try: os.write(fd, {report})
    except OSError: pass
os._exit(0)
"""
    assert run(code, way, tests=["assert False"]).held is None


def test_an_endless_loop_is_stopped(way):
    outcome = run("while True: pass", way)
    assert not outcome.ended_well


def test_sleeping_is_stopped(way):
    assert run("import time; time.sleep(600)", way).reason == "ran out of time"


def test_memory_is_limited(way):
    assert "MemoryError" in run("x = bytearray(2**30)", way).reason


def test_memory_is_limited_over_all_processes(way):
    code = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        kept = b"x" * (200 * 2**20)
        time.sleep(600)
time.sleep(600)
"""
    assert run(code, way).reason == "used more memory than allowed"


def test_files_in_memory_count(way):
    code = """
import os, time
files = [os.memfd_create(str(n)) for n in range(50)]
for file in files:
    os.write(file, b"x" * (15 * 2**20))
time.sleep(600)
"""
    assert run(code, way).reason == "used more memory than allowed"


def test_the_keyring_of_the_session_is_not_the_hosts(way):
    code = """
import ctypes
print(ctypes.CDLL(None).syscall(250, 0, -3, 1))
"""
    if platform.machine() != "x86_64":
        pytest.skip("the number of the call is x86's")
    here = ctypes.CDLL(None, use_errno=True).syscall(250, 0, -3, 1)  # the id of the session's keyring
    if here == -1:
        pytest.skip("this kernel has no keyrings")
    assert int(run(code, way).stdout) not in (-1, here)


def test_big_files_are_limited(way):
    code = "f = open('big', 'wb')\nfor _ in range(100): f.write(bytes(2**20)); f.flush()"
    assert not run(code, way).ended_well


def test_many_files_are_limited_in_namespaces(way):
    if way == "plain":
        pytest.skip("the folder is an ordinary one without namespaces")
    code = "for i in range(100): open(str(i), 'wb').write(bytes(2**20))"
    assert "No space left" in run(code, way).reason


def test_endless_output_is_cut(way):
    outcome = run("while True: print('x' * 10000)", way)
    assert outcome.reason == "wrote more output than allowed"
    assert len(outcome.stdout) <= QUICK.output_bytes


def test_endless_errors_are_cut(way):
    assert run("import sys\nwhile True: sys.stderr.write('x' * 10000)", way).reason == "wrote more output than allowed"


def test_a_fork_bomb_meets_its_limit(way):
    if way == "user" and os.getuid() == 0:
        pytest.skip("the kernel does not count root's processes; as root the way 'root' is taken")
    code = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(600)
        made += 1
except BlockingIOError:
    print('limited', made, flush=True)
"""
    outcome = run(code, way)
    assert outcome.stdout.startswith("limited")
    assert int(outcome.stdout.split()[1]) <= QUICK.processes


def test_orphans_are_gone(way):
    mark = f"orphan-{os.getpid()}-{way}"
    code = f"""
import os, subprocess, sys
for session in (True, False):
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'], start_new_session=session)
print('started')
"""
    outcome = run(code, way)
    assert outcome.stdout == "started\n", outcome.reason
    deadline = time.monotonic() + 20
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(mark) == []


@pytest.mark.parametrize(
    "blow", ["os.killpg(0, 9)", "os.kill(os.getppid(), 9)", "os.kill(0, 9)", "os.kill(os.getpid(), 9)"]
)
def test_killing_harms_only_itself(way, blow):
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        outcome = run(f"import os, time\n{blow}\ntime.sleep(1)", way, tests=["assert False"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outcome.held in (None, [False])
    assert seen == []


def test_everything_it_may_signal_spares_us(way):
    if way == "plain" and os.getuid() != 0:
        pytest.skip("without namespaces a program can signal its own user's processes, as the docs say")
    run("import os, signal\nos.kill(-1, signal.SIGKILL)", way)
    assert run("print(1)", way).stdout == "1\n"


def test_no_network_in_namespaces(way):
    if way == "plain":
        pytest.skip("no network namespace here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", way)
    assert "OSError" in outcome.reason or "ConnectionRefused" in outcome.reason


def test_our_files_and_secrets_are_out_of_reach(way, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-secret")
    kept = tmp_path / "kept"
    kept.write_text("ours")
    code = f"""
import os, pathlib
print('SECRET_TOKEN' in os.environ)
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    try: print(b'hunter2-secret' in pathlib.Path('/proc', pid, 'environ').read_bytes())
    except OSError: pass
try: open({str(kept)!r}, 'w').write('theirs')
except OSError: pass
"""
    outcome = run(code, way)
    if way == "plain" and os.getuid() != 0:
        assert outcome.stdout.splitlines()[0] == "False"
        return
    assert "True" not in outcome.stdout
    assert kept.read_text() == "ours"


def test_its_folder_is_removed(way):
    outcome = run("import os; open('x', 'w'); os.mkdir('d'); os.chmod('d', 0); print(os.getcwd())", way)
    assert outcome.ended_well, outcome.reason
    assert not Path(outcome.stdout.strip()).exists()


def test_no_descriptor_is_lost(way):
    run("pass", way)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for code in ("pass", "1/0", "while True: print('x' * 10000)"):
        run(code, way)
    assert not before or len(os.listdir("/proc/self/fd")) == before
