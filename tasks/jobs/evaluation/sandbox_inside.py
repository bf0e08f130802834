"""What runs on the inner side of tasks/jobs/evaluation/sandbox.py: three processes, the last of which runs foreign code.

The first one reads the order, and maps users. The second one makes new namespaces (user, mounts, processes, network, IPC, host
name), keeps the time and kills. The third one is process 1 in them: it changes to a root of its own, read-only and without /proc
and /dev, gives up every capability and the right to more processes, and runs the code. Standard library only, and a
file by itself: it is run by path, with neither our packages nor anybody else's in reach.
See user_namespaces(7), pivot_root(2), mount_setattr(2).
"""

from __future__ import annotations

import ctypes
import doctest
import json
import os
import platform
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY_NO_SUID_NO_DEVICES = 1 | 2 | 4
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")
libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Read the order from standard input, run it, and leave the verdict on standard output."""
    order = json.load(sys.stdin)
    _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    ready, mapped = os.pipe(), os.pipe()
    second = os.fork()
    if second == 0:
        _as_process(lambda: _keep_time(order, ready[1], mapped[0]))
    os.close(ready[1])
    if os.read(ready[0], 1) and order["namespaces"]:
        _map_users(second)
    os.write(mapped[1], b"x")
    return os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])


def _as_process(work: Callable[[], int]) -> None:
    """Do the work and end: nothing of the caller's stack is gone on with. What cannot be set up is told."""
    code = 70
    try:
        code = work()
    except BaseException as error:  # noqa: BLE001 the end of a process
        _tell({"setup": "".join(traceback.format_exception_only(error)).strip()})
    finally:
        os._exit(code)


def _tell(verdict: dict[str, Any]) -> None:
    os.write(1, (json.dumps(verdict) + "\n").encode())


def _map_users(pid: int) -> None:
    """Root is root in there until it becomes nobody; anybody else is nobody from the start."""
    root = os.geteuid() == 0
    for name, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        if name == "gid" and not root:
            _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/{name}_map", f"0 0 1\n{NOBODY} {NOBODY} 1" if root else f"{NOBODY} {own} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _keep_time(order: dict[str, Any], ready: int, mapped: int) -> int:
    """Start process 1 and kill it, and with it all others of its namespace, when its time is up."""
    _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if order["namespaces"]:
        _checked(libc.unshare(NEW_NAMESPACES), "unshare")
    os.write(ready, b"x")
    os.read(mapped, 1)
    first = os.fork()
    if first == 0:
        _as_process(lambda: _inside(order))
    deadline = time.monotonic() + order["seconds"]
    while time.monotonic() < deadline:
        if os.waitpid(first, os.WNOHANG)[0]:
            return 0
        time.sleep(0.01)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    _tell({"timeout": True})
    return 0


def _inside(order: dict[str, Any]) -> int:
    _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if order["namespaces"]:
        _own_root(order["root"])
    else:
        os.chdir(order["root"])
    null = os.open("/dev/null", os.O_RDWR) if Path("/dev/null").exists() else None
    for stream in (0, 2):
        os.dup2(null, stream) if null is not None else os.close(stream)
    os.closerange(3, 4096)
    os.environ.clear()
    _limit(order)
    _become_nobody()
    verdict = _run(order)
    sys.stdout = sys.__stdout__
    _tell({"nonce": order["nonce"], **verdict})
    return 0


def _own_root(root: str) -> None:
    """Change to a root in memory that holds the system's libraries and Python's own, all read-only."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    _mount("tmpfs", root, "tmpfs", 0, "size=1m,nr_inodes=1024,mode=755")
    kept: list[str] = []
    for folder in (*SYSTEM_FOLDERS, sys.base_prefix):
        if Path(folder).exists() and not any(folder.startswith(f"{other}/") for other in kept):
            _bind(Path(folder), Path(root + folder))
            kept.append(folder)
    Path(root, "tmp").mkdir()
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NO_SUID_NO_DEVICES, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    path = root.encode()
    _checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, size), "mount_setattr")
    os.chdir(root)
    _checked(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _checked(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/tmp")


def _bind(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(str(source), str(target), None, MS_BIND | MS_REC, None)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    said = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(libc.mount(said[0], said[1], said[2], ctypes.c_ulong(flags), said[3]), f"mount {target}")


def _limit(order: dict[str, Any]) -> None:
    """No file may grow, no further process may be, and CPU and memory are bounded."""
    cpu = order["cpu_seconds"]
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_AS: (order["memory"], order["memory"]),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_NPROC: (1, 1),
        resource.RLIMIT_NOFILE: (32, 32),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for kind, values in limits.items():
        resource.setrlimit(kind, values)


def _become_nobody() -> None:
    """No user that owns anything, no capability, and no way to get one back."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if os.geteuid() != NOBODY:
        raise PermissionError("foreign code would run as the user of the job")
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capset(header, none), "capset")
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # changing the user has taken it away


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Define what the code defines, then try each example of the prompt's own docstring."""
    examples = doctest.DocTestParser().get_examples(order["examples"])
    names: dict[str, Any] = {"__name__": "completion"}
    try:
        exec(compile(order["code"], "completion", "exec"), names)
    except BaseException as error:  # noqa: BLE001 whatever foreign code raises is its failure
        return {"attempted": 0, "failed": len(examples), "raised": type(error).__name__[:80]}
    test = doctest.DocTest(examples, names, "completion", None, None, None)
    found = doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None)
    return {"attempted": found.attempted, "failed": found.failed}


def _checked(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
