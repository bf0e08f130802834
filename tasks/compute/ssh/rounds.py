"""Rounds over the machines of the ssh backend: one command on each at once, what the answers say, and where a submission lies.

The commands are render.py; who asks, and what follows from it, is backend.py and elastic.py.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.errors import Missing
from tasks.common.process import read_json, write_json, write_text
from tasks.compute.connection import Connection, Ran, Unreachable, run_all
from tasks.compute.job import Job
from tasks.compute.nodes import python
from tasks.compute.ssh.hosts import Host
from tasks.compute.ssh.render import (
    BUSY,
    LEASES,
    REFUSED,
    STOP_SECONDS,
    find_command,
    look_command,
    probe_command,
    stop_command,
)
from tasks.config.backends.ssh import SshConfig

log = logging.getLogger("headway.compute")
PLACED = "ssh.json"
GONE_SECONDS = 3.0
"""How long a parent is gone before it counts: its exit mark may be on its way through the shared folder."""
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

    def round(
        self, commands: Mapping[Host, str], *, stdin: str = "", seconds: float = 30.0
    ) -> dict[Host, Ran | Missing]:
        """Run each machine's command, all at once; the answer of a machine that gives none is its error."""
        connections = {
            host: self._open.setdefault(host.address, Connection(host.address, self._settings)) for host in commands
        }
        answers = run_all({connections[host]: text for host, text in commands.items()}, stdin=stdin, seconds=seconds)
        return {host: answers[connection] for host, connection in connections.items()}

    def room(self, job: Job, folder: Path, hosts: Sequence[Host], *, mirrored: bool = False) -> Room:
        """Ask machines whether they could take a job, whose folder is there; with `mirrored` they do not see it."""
        if mirrored:
            return _room(self.round({host: probe_command(job, host, None) for host in hosts}), job, folder)
        nonce = folder / f"probe-{secrets.token_hex(8)}"
        write_text(nonce, "readable on every machine of the job\n")
        try:
            answers = self.round({host: probe_command(job, host, nonce) for host in hosts})
        finally:
            nonce.unlink()
        return _room(answers, job, folder)

    def look(self, pids: Mapping[Host, Sequence[int]]) -> dict[Host, Look | Missing]:
        """Ask machines which of these processes live."""
        answers = self.round({host: look_command(asked) for host, asked in pids.items()}, seconds=LOOK_SECONDS)
        return {host: answer if isinstance(answer, Missing) else _read_look(answer) for host, answer in answers.items()}

    def stop(self, submission_id: str, hosts: Iterable[Host]) -> dict[Host, str]:
        """End a submission's processes on machines; returns why, for each where that cannot be said."""
        command = stop_command(submission_id)
        answers = self.round({host: command for host in hosts}, seconds=STOP_SECONDS + 10)
        return {
            host: (answer.message if isinstance(answer, Missing) else "some processes did not end")
            for host, answer in answers.items()
            if isinstance(answer, Missing) or answer.code
        }

    def running(self, submission_id: str, hosts: Sequence[Host]) -> list[Host]:
        """Machines with a process of the submission. Raises Missing when none of them answers."""
        answers = self.round(dict.fromkeys(hosts, find_command(submission_id)))
        silent = [answer for answer in answers.values() if isinstance(answer, Missing)]
        if silent and len(silent) == len(hosts):
            raise silent[0]
        return [host for host, answer in answers.items() if isinstance(answer, Ran) and answer.code == 0]


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


def _room(answers: Mapping[Host, Ran | Missing], job: Job, folder: Path) -> Room:
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


def _unfit(host: Host, job: Job, folder: Path, answer: Ran) -> Missing:
    text = answer.stdout.strip()
    if text == "folder":
        return Missing(
            f"machine {host.name} cannot read {folder}: no shared folder there, or another user",
            remedy="Put Headway's home (HEADWAY_HOME) on a file system that all machines mount at the same path, and log in "
            "there as the same user (ssh.user). Or set cluster.mirror: then the folder lies in a store on Azure Blob.",
        )
    if text == "leases":
        return Missing(
            f"on machine {host.name} {LEASES.replace('$(id -u)', 'UID')} is somebody else's",
            remedy="Have it deleted there: Headway creates it again, for its own user alone.",
        )
    if text == "flock":
        return Missing(f"machine {host.name} has no flock", remedy="Install util-linux there.")
    if text == "python":
        return Missing(
            f"machine {host.name} has no Headway under {python(job)}: {answer.stderr.strip()[-300:]}",
            remedy="Install it there, and set cluster.python to the Python that has it.",
        )
    return Missing(
        f"machine {host.name} answers {(text or answer.stderr.strip())[-300:]!r}",
        remedy="Its login shell must run bash and print nothing of its own.",
    )


@dataclass(frozen=True)
class Placed:
    """Where a submission runs: a file of the job folder, written before anything is started."""

    submission: str
    hosts: tuple[Host, ...] = ()
    """In order of node rank; none while it is queued."""
    stage: str = "queued"
    """queued, starting, started, cancelled, lost, or refused by a machine."""
    reason: str = ""
    failed_nodes: tuple[str, ...] = ()
    mirrors: tuple[dict[str, Any], ...] = ()
    """Of a mirrored job, the process on each machine: its pid, start time and boot id."""


def write_placed(folder: Path, placed: Placed) -> None:
    write_json(folder / PLACED, asdict(placed))


def read_placed(folder: Path, submission: str) -> Placed | None:
    output = read_json(folder / PLACED)
    if not output or output["submission"] != submission:
        return None
    hosts, failed = tuple(Host(**host) for host in output["hosts"]), tuple(output["failed_nodes"])
    return Placed(**{**output, "hosts": hosts, "failed_nodes": failed, "mirrors": tuple(output.get("mirrors", ()))})


def may_pass(answer: Ran | Missing) -> bool:
    """Whether a machine that did not start a job may do so later: it runs another one, or gives no answer now."""
    return isinstance(answer, Unreachable) if isinstance(answer, Missing) else answer.code == BUSY


def refusal(host: Host, answer: Ran | Missing, folder: Path) -> Missing:
    """What a machine that did not start a job says."""
    if isinstance(answer, Missing):
        return answer
    output = answer.stderr.strip()[-500:]
    if answer.code == REFUSED:
        return Missing(
            f"machine {host.name} cannot use the store of cluster.mirror: {output}",
            remedy="Grant its identity Storage Blob Data Contributor on the container, or set cluster.mirror.credential. "
            "Or do without the machine: cluster.exclude.",
        )
    return Missing(f"machine {host.name} did not start the job: {output}", remedy=f"See {folder}/nodes.")


def stop_everywhere(machines: Machines, placed: Placed, folder: Path) -> bool:
    """Stop a submission on all its machines; whether one does not answer: it finds in the job folder that it is not wanted."""
    left = machines.stop(placed.submission, placed.hosts)
    if left:
        write_json(folder / "job.json", {**(read_json(folder / "job.json") or {}), "submission": 0})
    for host, why in left.items():
        log.warning(
            "%s was not stopped on machine %s (%s); it stops by itself as soon as that machine reads %s",
            placed.submission,
            host.name,
            why,
            folder,
        )
    return bool(left)


def too_few(job: Job, room: Room) -> Missing:
    host, error = next(iter(room.out.items()))
    machines = len(room.free) + len(room.busy)
    return Missing(
        f"{job.name} needs {job.fewest_nodes} machines, and {machines} can take it; machine {host.name}: {error.message}",
        remedy=f"{error.remedy} Or do without it: cluster.exclude.",
    )
