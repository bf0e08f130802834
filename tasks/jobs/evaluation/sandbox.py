"""A sandbox for code that a model wrote: one short process of its own, which can neither change nor reach anything.

bubblewrap holds it: namespaces of its own, a read-only root with the system's and Python's own folders, no capability, and a
filter of system calls, which leaves it no second process, no socket and no memory that its limit does not count. Where there is
no bubblewrap, limits and another user are what is left, and only on request. The suite is code_suite.py. The verdict comes from
the process that runs the code (sandbox_inside.py), under a word that the code is not told: what looks for it in the
interpreter's own memory can forge a pass, and nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.common.errors import Missing

# The system calls that are refused to code that a model wrote, as a filter that bubblewrap loads. See seccomp(2),
# bpf(4).
#
# Refused are further processes and threads, sockets of every family, memory that no limit counts (System V, memfd), new
# namespaces, mounts, debugging, keys, and what would leave the group or the parent that ends it; and every call that is
# newer than Linux 5.1, of which libc can do without. Refused calls fail with EPERM, the newer ones with ENOSYS.

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


FIRST_NEWER = 424
"""From here on the numbers are the same everywhere; those of the x32 ABI are larger still."""


REFUSED = {
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "setsid": (112, 157), "setpgid": (109, 154),
    "prctl": (157, 167), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "socket": (41, 198), "socketpair": (53, 199), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "memfd_create": (319, 279), "io_setup": (206, 0), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "personality": (135, 92), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip
"""Numbers on x86_64 and aarch64."""


LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06


NUMBER, ARCHITECTURE = 0, 4
"""Offsets in struct seccomp_data."""


ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def seccomp_filter() -> bytes:
    """The filter for this machine. Raises Missing for one whose numbers are not known here."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise Missing(
            f"no sandbox can be made here for code that a model wrote: there is no filter of system calls for {machine}",
            remedy="Evaluate on x86_64 or aarch64, or leave evaluation.code.problems empty.",
        )
    column = list(AUDIT_ARCH).index(machine)
    numbers = sorted(number for each in REFUSED.values() if (number := each[column]) is not None)
    newer, refused = ERRNO | errno.ENOSYS, ERRNO | errno.EPERM
    lines = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, newer),
        (LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, FIRST_NEWER), (RETURN, 0, 0, newer),
    ]  # fmt: skip
    for number in numbers:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refused)]
    return b"".join(struct.pack("=HBBI", *line) for line in (*lines, (RETURN, 0, 0, ALLOW)))


INSIDE = Path(__file__).with_name("sandbox_inside.py")


VERDICT_BYTES = 4096
"""Most that is read of what the process says."""


GRACE_SECONDS = 20.0
"""For starting Python on a loaded machine, before its time counts."""


NOBODY = "65534"


SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache")


PROBE = "import colorsys\n\n\ndef one():\n    return 1\n"
"""The import shows that the standard library can be read in there."""


PROBE_EXAMPLES = ">>> one()\n1\n"


Outcome = Literal["passed", "failed", "raised", "timeout", "died"]


@dataclass(frozen=True)
class Limits:
    """What a piece of code may use."""

    seconds: float
    """Of the clock."""
    cpu_seconds: int
    memory_bytes: int
    """Of address space; Python itself takes about 30 MB of it."""
    namespaces: bool = True
    """Without, the process is kept from the rest only by its user and its limits, and has the network."""


def run_code(code: str, examples: str, limits: Limits) -> Outcome:
    """Whether code passes all examples, written as in a docstring. `died`: no verdict, however it ended."""
    output = _said(code, examples, limits)
    verdict = output.get("verdict", {})
    if output.get("timeout"):
        return "timeout"
    if not verdict:
        return "died"
    if verdict.get("raised"):
        return "raised"
    return "passed" if verdict["attempted"] > 0 and verdict["failed"] == 0 else "failed"


def best_limits(limits: Limits, *, fall_back: bool) -> Limits:
    """The limits as this machine can hold foreign code to them; with `fall_back` without namespaces where it allows none.

    Raises Missing where it cannot.
    """
    why = "bubblewrap (bwrap) is not installed"
    for tried in (limits, replace(limits, namespaces=False)) if fall_back else (limits,):
        if tried.namespaces and not shutil.which("bwrap"):
            continue
        output = _said(PROBE, PROBE_EXAMPLES, tried)
        if output.get("verdict") == {"attempted": 1, "failed": 0}:
            return tried
        why = output["setup"] or "the probe gave no verdict"
    raise Missing(
        f"no sandbox can be made here for code that a model wrote: {why}",
        remedy="Install bubblewrap (Debian's package `bubblewrap`) and allow user namespaces (user.max_user_namespaces; in a "
        "container --security-opt seccomp=unconfined), or as root set evaluation.code.allow_without_namespaces, or leave "
        "evaluation.code.problems empty.",
    )


def _said(code: str, examples: str, limits: Limits) -> dict[str, Any]:
    nonce = secrets.token_hex(16)
    with ExitStack() as stack:
        order, filter_, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        order.write(
            json.dumps(
                {
                    "code": code,
                    "examples": examples,
                    "nonce": nonce,
                    "cpu_seconds": limits.cpu_seconds,
                    "memory": limits.memory_bytes,
                }
            ).encode()
        )
        order.seek(0)
        if limits.namespaces:
            filter_.write(seccomp_filter())
            filter_.seek(0)
        process = subprocess.Popen(
            _held(filter_.fileno()) if limits.namespaces else _as_nobody(),
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[filter_.fileno()],
            env={"PATH": os.defpath},
            cwd="/",
            start_new_session=True,
        )
        try:
            text, timeout = _read(process, limits.seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        setup = errors.read(500).decode(errors="replace").strip()
    return {"setup": setup, "timeout": timeout, **_parsed(text, nonce)}


def _held(filter_: int) -> list[str]:
    """The command under bubblewrap. `filter_` is the open file of the filter of system calls."""
    spaces = [f"--unshare-{kind}" for kind in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    nobody = ["--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL", "--die-with-parent", "--as-pid-1"]
    files = [word for folder in _folders() for word in _shown(Path(folder))]
    files += ["--ro-bind", str(INSIDE), "/inside.py", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return ["bwrap", *spaces, *nobody, *files, "--seccomp", str(filter_), *_python("/inside.py")]


def _as_nobody() -> list[str]:
    """The command without namespaces, which only root can give. The program is its text: `nobody` may be unable
    to read the checkout."""
    nobody = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs", "--pdeathsig=KILL"]
    return [
        "setpriv",
        *nobody,
        "--bounding-set=-all",
        "--inh-caps=-all",
        *_python("-c", INSIDE.read_text(encoding="utf-8")),
    ]


def _python(*program: str) -> list[str]:
    return [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-B", *program]


def _folders() -> list[str]:
    """The system's libraries and Python's own, each once."""
    kept: list[str] = []
    for folder in (*SYSTEM_FOLDERS, sys.base_prefix):
        if Path(folder).exists() and not any(folder.startswith(f"{other}/") for other in kept):
            kept.append(folder)
    return kept


def _shown(folder: Path) -> list[str]:
    if folder.is_symlink():
        return ["--symlink", str(folder.readlink()), str(folder)]
    return ["--ro-bind", str(folder), str(folder)]


def _read(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
    """What it says until it ends, at most VERDICT_BYTES, and whether its time was up, which counts from its first word on.

    What it says beyond is not read, and it is waited for.
    """
    assert process.stdout
    text, deadline = b"", time.monotonic() + GRACE_SECONDS
    with process.stdout as pipe:
        while len(text) < VERDICT_BYTES:
            if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                return text, True
            part = os.read(pipe.fileno(), VERDICT_BYTES - len(text))
            if not part:
                return text, False
            deadline = deadline if text else time.monotonic() + seconds
            text += part
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return text, True
    return text, False


def _parsed(text: bytes, nonce: str) -> dict[str, Any]:
    for line in text.splitlines():
        try:
            payload = json.loads(line)
        except ValueError:
            continue
        if isinstance(payload, dict) and payload.pop("nonce", "") == nonce:
            return {"verdict": payload}
    return {}
