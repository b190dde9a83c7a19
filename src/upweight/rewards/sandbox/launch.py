"""The launcher of a sandboxed program: it drops rights, then becomes the program.

It imports nothing of Upweight, so that it starts fast.
Started as `python -I -S launch.py REPORT_FD` with a JSON request on stdin. It tries the strongest isolation
first; the program's process writes one line of JSON on REPORT_FD (the isolation in effect) just before exec.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from collections.abc import Callable

SETUP_FAILED = 121
LINUX = sys.platform == "linux"
NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mount, uts, ipc, pid, net
USER_NAMESPACE = 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
KEYCTL_JOIN_SESSION_KEYRING = 1
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID = 0x1, 0x2
DEVICES = ("null", "zero", "full", "random", "urandom")
HIDDEN_FOLDERS = ("/home", "/root", "/run", "/tmp", "/var/tmp", "/mnt", "/media")
LIBC = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raise the C library's error when a call of it failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """One mount(2)."""
    texts = [text.encode() for text in (source, target, kind)]
    checked(LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    if LINUX:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide(folder: str, keep: list[str]) -> None:
    """Mount an empty folder over `folder`; only the folders in `keep` stay visible under it."""
    if not os.path.isdir(folder) or os.path.islink(folder) or folder in keep:
        return
    kept = [(path, os.open(path, os.O_PATH)) for path in keep if path.startswith(folder + "/") and os.path.isdir(path)]
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path, handle in sorted(kept):
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", path, "", MS_BIND | MS_REC)
        os.close(handle)


def fresh_devices() -> None:
    """Replace /dev by one that has only the harmless devices."""
    kept = [(name, os.open(f"/dev/{name}", os.O_PATH)) for name in DEVICES if os.path.exists(f"/dev/{name}")]
    mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for name, handle in kept:
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{handle}", f"/dev/{name}", "", MS_BIND)
        os.close(handle)


def mount_attributes(folder: str, flags: int = 0, *, on: int = 0, off: int = 0) -> bool:
    """Switch attributes of mounts on and off; False where the kernel is older than 5.12."""
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
    where = (ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, folder.encode(), flags)
    return LIBC.syscall(*where, ctypes.byref(attributes), ctypes.c_size_t(32)) == 0


def private_view(request: dict, folder: str) -> list[str]:
    """In new namespaces: hide homes, sockets and devices, forbid writing, and mount a small folder to work in."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    fresh_devices()
    holds = []
    if request["hide"]:
        keep = [*request["keep"], folder]
        for hidden in sorted({*HIDDEN_FOLDERS, request["home"]}, key=len):
            if hidden != "/":
                hide(hidden, keep)
        holds.append("hidden")
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except OSError:
        holds.append("outer-proc")  # a container masks parts of /proc and allows no new one
    if mount_attributes("/", AT_RECURSIVE, on=ATTR_RDONLY | ATTR_NOSUID):
        holds.append("read-only")
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=700,size={request['disk_bytes']}")
    return holds


def user_threads() -> int:
    """How many threads the current user has in the whole system: what the process limit is counted against."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return total


def set_limits(request: dict, mode: str) -> None:
    """The resource limits of the program."""
    limits = {
        resource.RLIMIT_CPU: int(request["seconds"]) + 1,
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_FSIZE: request["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    kernel = [int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit()]
    counted_apart = os.getuid() != request["user"] or (mode == "user" and kernel >= [5, 14])
    if LINUX:
        limits[resource.RLIMIT_NPROC] = request["processes"] + (0 if counted_apart else user_threads())
    for kind, wanted in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            if LINUX:  # macOS refuses RLIMIT_AS
                raise


def become_nobody(request: dict, folder: str) -> None:
    """As root, switch to an unused user id, so that limits apply and no other process can be signalled."""
    user = request["spare_user"]
    for path in [folder, *(os.path.join(folder, name) for name in os.listdir(folder))]:
        os.chown(path, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def leave_keyring() -> None:
    """Begin a new session keyring, since the host's may hold credentials."""
    number = {"x86_64": 250, "aarch64": 219}.get(platform.machine())  # of keyctl; other systems have no such call
    if LINUX and number is not None:
        LIBC.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None)


def become_program(request: dict, mode: str, report: int) -> None:
    """The last steps, in the process that is to be the program; returns only by an exception."""
    folder, holds = request["folder"], [mode]
    os.setsid()
    leave_keyring()
    if mode in ("root", "user"):
        holds += private_view(request, folder)
    os.chdir(folder)
    for name in ("payload.json", "stdin"):
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request[name])
    if mode != "user" and request["user"] == 0:
        become_nobody(request, folder)
        holds.append("spare-user")
    for needed in (request["program"], os.__file__):
        os.close(os.open(needed, os.O_RDONLY))
    if not os.access(sys.executable, os.X_OK):
        raise PermissionError(sys.executable)
    set_limits(request, mode)
    die_with_parent()
    if LINUX:
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    stdin = os.open("stdin", os.O_RDONLY)
    os.dup2(stdin, 0)
    os.set_inheritable(report, True)
    os.write(report, json.dumps({"holds": holds, "pid": os.getpid(), "user": os.getuid()}).encode() + b"\n")
    os.execv(sys.executable, [sys.executable, "-I", "-B", request["program"]])


def in_child(action: Callable[[], None]) -> int:
    """Run something in a forked process -> its exit status as a shell would give it."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        try:
            action()
        except Exception as error:  # this copy must exit below in any case and never continue as its parent
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(SETUP_FAILED)
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def attempt(request: dict, mode: str, report: int) -> None:
    """One way of isolating, from new namespaces to the program's end; exits with the program's status."""
    user, group = os.geteuid(), os.getegid()
    if mode == "root":
        checked(LIBC.unshare(NAMESPACES), "unshare")
    elif mode == "user":
        checked(LIBC.unshare(NAMESPACES | USER_NAMESPACE), "unshare")
        # Not 0 inside: the capabilities of the new namespace are then lost when the program starts.
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    os._exit(in_child(lambda: become_program(request, mode, report)))


def main() -> None:
    """Try the ways of isolating from the strongest down; exit with the program's status."""
    report = int(sys.argv[1])
    request = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # else a program could read the request by way of /proc
    request["user"] = os.getuid()
    die_with_parent()
    possible = ["plain"]
    if LINUX:
        possible = ["root", "user", "plain"] if request["user"] == 0 else ["user", "plain"]
    ways = [(mode, hidden) for mode in possible for hidden in (True, False) if hidden is False or mode != "plain"]
    for mode, hidden in (way for way in ways if way[0] in request["ways"]):
        code = in_child(lambda mode=mode, hidden=hidden: attempt({**request, "hide": hidden}, mode, report))
        if code != SETUP_FAILED:
            os._exit(code)
    os._exit(SETUP_FAILED)


if __name__ == "__main__":
    main()
