"""A sandbox for code that a model wrote: one short process of its own, which can neither change nor reach anything.

What holds it is sandbox_inside.py: namespaces of its own, a read-only root, no network, no second process, no capability, limits
of CPU, memory and time. Where the machine allows no namespaces, limits and another user are what is left, and only on
request. The suite is code_suite.py. The verdict comes from the process that runs the code, under a word that
the code is not told: what looks for it in the interpreter's own memory can forge a pass, and nothing else.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.errors import Missing

INSIDE = Path(__file__).with_name("sandbox_inside.py")
VERDICT_BYTES = 4096
"""Most that is read of what the process says."""
GRACE_SECONDS = 20.0
"""Beyond its time, for starting Python on a loaded machine, until the whole group is killed from outside."""
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
    said = _said(code, examples, limits)
    verdict = said.get("verdict", {})
    if said.get("timeout"):
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
    why = "nothing was tried"
    for tried in (limits, replace(limits, namespaces=False)) if fall_back else (limits,):
        said = _said(PROBE, PROBE_EXAMPLES, tried)
        if said.get("verdict") == {"attempted": 1, "failed": 0}:
            return tried
        why = said.get("setup") or "the probe gave no verdict"
    raise Missing(
        f"no sandbox can be made here for code that a model wrote: {why}",
        remedy="Allow user namespaces (user.max_user_namespaces; in a container --security-opt seccomp=unconfined), or as root "
        "set evaluation.code.allow_without_namespaces, or leave evaluation.code.problems empty.",
    )


def _said(code: str, examples: str, limits: Limits) -> dict[str, Any]:
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="headway-sandbox-") as root, tempfile.TemporaryFile() as order:
        Path(root).chmod(0o755)
        order.write(json.dumps(_order(code, examples, limits, root=root, nonce=nonce)).encode())
        order.seek(0)
        python = getattr(sys, "_base_executable", sys.executable)
        process = subprocess.Popen(
            [python, "-I", "-S", "-B", str(INSIDE)],
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd=root,
            start_new_session=True,
        )
        try:
            text = _read(process, limits.seconds + GRACE_SECONDS)
        finally:
            _end(process)
    return _parsed(text, nonce)


def _order(code: str, examples: str, limits: Limits, *, root: str, nonce: str) -> dict[str, Any]:
    return {
        "code": code,
        "examples": examples,
        "root": root,
        "nonce": nonce,
        "seconds": limits.seconds,
        "cpu_seconds": limits.cpu_seconds,
        "memory": limits.memory_bytes,
        "namespaces": limits.namespaces,
    }


def _read(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """What it says until it ends, at most VERDICT_BYTES; what it says beyond is not read, and it is waited for."""
    assert process.stdout
    text, deadline = b"", time.monotonic() + seconds
    while len(text) < VERDICT_BYTES and (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        part = os.read(process.stdout.fileno(), VERDICT_BYTES - len(text))
        if not part:
            break
        text += part
    process.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(deadline - time.monotonic(), 0))
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _parsed(text: bytes, nonce: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and told.pop("nonce", "") == nonce:
            said["verdict"] = told
        elif isinstance(told, dict):
            said |= {name: told[name] for name in ("setup", "timeout") if name in told}
    return said
