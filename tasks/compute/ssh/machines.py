"""Rounds over the machines of the ssh backend: one command on each at once, and what the answers say.

The commands are render.py; what follows from an answer for a job is backend.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.errors import Missing
from tasks.common.process import read_json, write_text
from tasks.compute.connection import Connection, Ran, run_all
from tasks.compute.job import Job
from tasks.compute.nodes import python
from tasks.compute.ssh.hosts import Host
from tasks.compute.ssh.render import STOP_SECONDS, find_command, look_command, probe_command, stop_command
from tasks.config.cluster import SshConfig

LOOK_SECONDS = 10.0


@dataclass(frozen=True)
class Look:
    """What a machine says of its processes."""

    boot_id: str
    started: Mapping[int, str] = field(default_factory=dict)
    """Start time of each process that lives, as tasks/common/process.py counts it."""

    def alive(self, handle: Mapping[str, Any]) -> bool:
        return handle.get("boot_id") == self.boot_id and self.started.get(handle["pid"]) == handle.get("started")


@dataclass(frozen=True)
class Room:
    """Which machines could take a job now."""

    free: list[Host]
    busy: dict[Host, str]
    """With what they run."""
    out: dict[Host, Missing]
    """Those that give no answer, refuse us, or lack something, with what to do."""


class Machines:
    """Connections to machines, kept open. State: the connections."""

    def __init__(self, settings: SshConfig) -> None:
        self._settings = settings
        self._open: dict[str, Connection] = {}

    def round(self, commands: Mapping[Host, str], *, seconds: float = 30.0) -> dict[Host, Ran | Missing]:
        """Run each machine's command, all at once; the answer of a machine that gives none is its error."""
        connections = {host: self._connection(host) for host in commands}
        answers = run_all({connections[host]: text for host, text in commands.items()}, seconds=seconds)
        return {host: answers[connection] for host, connection in connections.items()}

    def room(self, job: Job, folder: Path, hosts: Sequence[Host]) -> Room:
        """Ask machines whether they could take a job, whose folder is there."""
        nonce = folder / f"probe-{secrets.token_hex(8)}"
        write_text(nonce, "readable on every machine of the job\n")
        try:
            answers = self.round({host: probe_command(job, host, nonce) for host in hosts})
        finally:
            nonce.unlink()
        room = Room([], {}, {})
        for host, answer in answers.items():
            if isinstance(answer, Missing):
                room.out[host] = answer
            elif answer.stdout.startswith("busy"):
                room.busy[host] = answer.stdout.removeprefix("busy").strip()
            elif answer.stdout.strip() == "free":
                room.free.append(host)
            else:
                room.out[host] = _unfit(host, job, folder, answer)
        return room

    def look(self, pids: Mapping[Host, Sequence[int]]) -> dict[Host, Look | Missing]:
        """Ask machines which of these processes live."""
        answers = self.round({host: look_command(asked) for host, asked in pids.items()}, seconds=LOOK_SECONDS)
        return {host: answer if isinstance(answer, Missing) else _read_look(answer) for host, answer in answers.items()}

    def stop(self, submission_id: str, hosts: Iterable[Host]) -> dict[Host, str]:
        """End a submission's processes on machines; returns why, for each where that cannot be said."""
        command = stop_command(submission_id)
        answers = self.round({host: command for host in hosts}, seconds=STOP_SECONDS + 10)
        return {host: _why(answer) for host, answer in answers.items() if isinstance(answer, Missing) or answer.code}

    def running(self, submission_id: str, hosts: Sequence[Host]) -> list[Host]:
        """Machines with a process of the submission. Raises Missing when none of them answers."""
        answers = self.round(dict.fromkeys(hosts, find_command(submission_id)))
        silent = [answer for answer in answers.values() if isinstance(answer, Missing)]
        if silent and len(silent) == len(hosts):
            raise silent[0]
        return [host for host, answer in answers.items() if isinstance(answer, Ran) and answer.code == 0]

    def _connection(self, host: Host) -> Connection:
        return self._open.setdefault(host.address, Connection(host.address, self._settings))


class Silence:
    """Since when nothing new was seen of something, by this machine's own clock. State: what was seen last, and when."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Path, str], tuple[Any, float]] = {}

    def seconds(self, path: Path, value: Any, *, of: str = "") -> float:
        """Seconds for which a file, or what else is said `of` it, has had this value; 0 at the first look."""
        now = time.monotonic()
        before, since = self._seen.get((path, of), (None, now))
        if before != value:
            since = now
        self._seen[path, of] = (value, since)
        return now - since

    def of_beat(self, path: Path) -> float:
        """Seconds since a machine's beat changed."""
        return self.seconds(path, (read_json(path) or {}).get("time"))


def _read_look(answer: Ran) -> Look:
    boot_id, *stats = answer.stdout.splitlines() or [""]
    started = {}
    for line in stats:
        pid, _, rest = line.partition(" ")
        fields = rest.rpartition(")")[2].split()
        if fields[0] not in "ZX":
            started[int(pid)] = fields[19]
    return Look(boot_id.strip(), started)


def _unfit(host: Host, job: Job, folder: Path, answer: Ran) -> Missing:
    said = answer.stdout.strip()
    if said == "folder":
        return Missing(
            f"machine {host.name} cannot read {folder}: no shared folder there, or another user",
            remedy="Put Headway's home (HEADWAY_HOME) on a file system that all machines mount at the same path, and log in "
            "there as the same user (ssh.user).",
        )
    if said == "flock":
        return Missing(f"machine {host.name} has no flock", remedy="Install util-linux there.")
    if said == "python":
        return Missing(
            f"machine {host.name} has no Headway under {python(job)}: {answer.stderr.strip()[-300:]}",
            remedy="Install it there, and set cluster.python to the Python that has it.",
        )
    return Missing(
        f"machine {host.name} answers {(said or answer.stderr.strip())[-300:]!r}",
        remedy="Its login shell must run bash and print nothing of its own.",
    )


def _why(answer: Ran | Missing) -> str:
    return answer.message if isinstance(answer, Missing) else "some processes did not end"
