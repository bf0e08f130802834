"""The ssh backend: plain machines, VMs or a scale set, each with one job at a time, whose home is a shared folder.

With `cluster.mirror` they share none: the job's folder lies in a store (../job_folder.py), and its mirror runs above the parent.

A machine's parent (tasks/common/process.py) outlives the connection and the orchestrator; its handle and marks lie in the job
folder. There is no scheduler: a job whose machines are taken waits as `queued`, and is started by whoever looks at it. Scripts
are in render.py, the host list in hosts.py. See docs/ssh.md.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import OpenFiles
from tasks.common import process
from tasks.common.errors import HeadwayError, IntegrityError, Missing
from tasks.common.process import read_json, write_json, write_text
from tasks.compute.connection import Connection, Ran, Unreachable, run_all
from tasks.compute.job import Failure, Job, JobState, NotAccepted, Rendered, before_submission
from tasks.compute.job_folder import MirroredFolders, has_listed_output, key_of
from tasks.compute.nodes import ended_state, python, write_nodes
from tasks.compute.ssh.hosts import Host, read_hosts, usable
from tasks.compute.ssh.render import (
    BUSY,
    CHECK_SECONDS,
    LEASES,
    REFUSED,
    STOP_SECONDS,
    find_command,
    look_command,
    probe_command,
    script_path,
    start_command,
    start_script,
    stop_command,
)
from tasks.config.backends.ssh import SshConfig
from tasks.config.cluster import ClusterConfig

# Rounds over the machines of the ssh backend: one command on each at once, and what the answers say.


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


log = logging.getLogger("headway.compute")
PLACED = "ssh.json"
LAST_FILES_SECONDS = 600.0
"""How long mirrors may send what is left after the leader has ended."""
GONE_SECONDS = 3.0
"""How long a parent is gone before it counts: its exit mark may be on its way through the shared folder."""


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


class SshBackend:
    """Machines of a host list. State: open connections, and since when a machine is silent."""

    poll_seconds = 2.0

    def __init__(self, config: ClusterConfig, files: OpenFiles | None = None) -> None:
        """`files` gives the container of a store by its name, where `cluster.mirror` names one. Raises ValueError."""
        self._config = config
        self._mirrored = MirroredFolders(config.mirror, files(config.mirror.store)) if config.mirror and files else None
        self._hosts = read_hosts(config.ssh)
        self._machines = Machines(config.ssh)
        self._silence = Silence()

    def render(self, job: Job, folder: Path) -> Rendered:
        """The scripts as they are when the first machines of the list are free."""
        hosts = usable(job, self._hosts)[: job.nodes]
        scripts = [start_script(job, folder, hosts, rank, self._mirrored) for rank in range(job.nodes)]
        files = {f"nodes/{rank}/start.sh": text for rank, text in enumerate(scripts)}
        steps = [{"machine": host.address, "command": start_command(folder, k)} for k, host in enumerate(hosts)]
        return Rendered(backend="ssh", files=files, request={"run": steps})

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        usable(job, self._hosts)
        if self._mirrored:
            with before_submission():
                self._mirrored.send(job, folder)
        else:
            write_nodes(job, folder)
        _write(folder, Placed(job.submission_id))
        self._place(job, folder)
        return _handle(job)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        """What was placed is found in the folder; what was not, and runs all the same, is stopped, for it is half a job."""
        placed = _read(folder, job.submission_id)
        if placed and placed.stage != "starting":
            return _handle(job)
        half = placed.hosts if placed else self._machines.running(job.submission_id, self._hosts)
        for host, why in self._machines.stop(job.submission_id, half).items():
            raise Missing(
                f"{job.submission_id} may run on machine {host.name}: {why}", remedy="Try again when it answers."
            )
        return None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        placed = [_read(folder, handle["submission"]) for handle, folder in jobs]
        messages = [
            self._not_brought(p, folder) or _from_files(p, folder, mirrored=self._mirrored is not None)
            for p, (_, folder) in zip(placed, jobs, strict=True)
        ]
        asked = [(p, f) for p, (_, f), known in zip(placed, jobs, messages, strict=True) if p and p.hosts and not known]
        looks = self._look(asked) if asked else {}
        return [
            known or (self._judge(p, folder, looks) if p and p.hosts else self._queued(folder, handle))
            for p, (handle, folder), known in zip(placed, jobs, messages, strict=True)
        ]

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        with process.locked(folder / "ssh.lock"):
            placed = _read(folder, handle["submission"]) or Placed(handle["submission"])
            _write(folder, Placed(placed.submission, placed.hosts, "cancelled"))
        self._stop(placed, folder)

    def _place(self, job: Job, folder: Path) -> Placed:
        """Take the first machines that are free and start the job on them; else it stays queued.

        Raises Missing when the machines that answer are too few, whatever they do now.
        """
        room = self._machines.room(job, folder, usable(job, self._hosts), mirrored=self._mirrored is not None)
        if job.nodes > len(room.free) + len(room.busy):
            raise _too_few(job, room)
        for host, error in room.out.items():
            log.warning("%s does without machine %s: %s", job.submission_id, host.name, error.message)
        with process.locked(folder / "ssh.lock"):
            now = _read(folder, job.submission_id)
            if now and now.stage == "cancelled":
                return now
            busy = ", ".join(f"{host.name} runs {what}" for host, what in room.busy.items())
            placed = Placed(job.submission_id, reason=f"{job.nodes} machines are needed, {len(room.free)} free; {busy}")
            if job.nodes <= len(room.free):
                hosts = tuple(room.free[: job.nodes])
                _write(folder, Placed(job.submission_id, hosts, "starting"))
                placed = self._start(job, folder, hosts)
            _write(folder, placed)
        return placed

    def _start(self, job: Job, folder: Path, hosts: tuple[Host, ...]) -> Placed:
        """Start every machine's part, or none: what did start is stopped when another machine did not.

        Raises Missing for a machine that would not start it later either; NotAccepted where nothing of the job is left anywhere.
        """
        (folder / "attempt.json").unlink(missing_ok=True)
        for rank in range(len(hosts)):
            for name in ("exit.json", "handle.json", "node.json", "beat"):  # of a start that was taken back
                (folder / "nodes" / str(rank) / name).unlink(missing_ok=True)
            write_text(script_path(folder, rank), start_script(job, folder, hosts, rank, self._mirrored))
        mirrored = self._mirrored is not None
        commands = {host: start_command(folder, rank, mirrored=mirrored) for rank, host in enumerate(hosts)}
        key = f"{key_of(folder).decode()}\n" if mirrored else ""
        answers = self._machines.round(commands, stdin=key, seconds=30.0 + CHECK_SECONDS * mirrored)
        failed = {host: a for host, a in answers.items() if isinstance(a, Missing) or a.code}
        if not failed:
            mirrors = tuple(_mirror(answer) for answer in answers.values()) if mirrored else ()
            return Placed(job.submission_id, hosts, "started", mirrors=mirrors)
        left = self._machines.stop(job.submission_id, hosts)
        for host, answer in failed.items():
            if not _may_pass(answer):
                error = _refusal(host, answer, folder)
                raise error if left or error is answer else NotAccepted(error, final=True)
        answer = next(iter(failed.values()))
        return Placed(
            job.submission_id, reason=answer.message if isinstance(answer, Missing) else answer.stderr.strip()
        )

    def _queued(self, folder: Path, handle: Mapping[str, Any]) -> JobState:
        """Look for room; a machine that is away is no failure of a job that waits, one that refuses to start it is."""
        job = Job.model_validate(read_json(folder / "job.json"))
        try:
            placed = self._place(job, folder)
        except NotAccepted as error:
            return _refused(job, folder, error)
        except Missing as error:
            return JobState(state="queued", reason=error.message)
        return JobState(state="starting" if placed.hosts else "queued", reason=placed.reason)

    def _look(self, jobs: Sequence[tuple[Placed, Path]]) -> dict[Host, Look | Missing]:
        """One round for all jobs; when it has no answer at all, the other machines of the list are asked whether we are off."""
        pids: dict[Host, list[int]] = {host: [] for placed, _ in jobs for host in placed.hosts}
        for placed, folder in jobs:
            for rank, host in enumerate(placed.hosts):
                pids[host] += [handle["pid"]] if (handle := _parent(placed, folder, rank)) else []
        looks = self._machines.look(pids)
        if not any(isinstance(look, Look) for look in looks.values()):
            looks |= self._machines.look({host: [] for host in self._hosts if host not in pids})
        return looks

    def _judge(self, placed: Placed, folder: Path, looks: Mapping[Host, Look | Missing]) -> JobState:
        """The state of a job whose machines were asked, and which has no end of its own yet."""
        if not any(isinstance(look, Look) for look in looks.values()):
            error = next(look for look in looks.values() if isinstance(look, Missing))
            return JobState(state="unknown", reason=f"no machine answers: {error.message}")
        gone = [r for r, host in enumerate(placed.hosts) if self._is_gone(placed, folder, r, looks[host])]
        ended = ended_state(folder)
        if ended and self._mirrored:
            return self._settled(placed, folder, looks, ended)
        if ended or not gone:
            return ended or JobState(state="running")
        vanished = [rank for rank in gone if _vanished(placed, folder, rank, looks[placed.hosts[rank]])]
        names = tuple(placed.hosts[rank].name for rank in vanished or gone)
        reason = f"the parent process on {', '.join(names)} ended without a result"
        if vanished:
            reason = f"machine {', '.join(names)} is gone: no answer, and no sign of life in the job folder"
        lost = replace(placed, stage="lost", reason=reason, failed_nodes=names if vanished else ())
        _write(folder, lost)
        self._stop(placed, folder)
        return _lost(lost)

    def _not_brought(self, placed: Placed | None, folder: Path) -> JobState | None:
        """Bring what a mirrored job changed in the store; why its state is not known, where that fails."""
        if not (self._mirrored and placed and placed.hosts) or placed.stage == "lost":
            return None
        try:
            self._mirrored.bring(folder)
        except HeadwayError as error:
            return JobState(state="unknown", reason=f"{error} {error.remedy}".strip())
        return None

    def _settled(self, placed: Placed, folder: Path, looks: Mapping[Host, Look | Missing], ended: JobState) -> JobState:
        """The state of a mirrored job whose leader ended: over once no mirror sends files any more."""
        assert self._mirrored
        sending = []
        for rank, (host, mirror) in enumerate(zip(placed.hosts, placed.mirrors, strict=True)):
            match looks[host]:
                case Look() as look:
                    alive = look.alive(mirror)
                case _:  # it did not answer, which is no word about its mirror
                    alive = ended.code == 0 and not has_listed_output(folder, rank)
            sending += [host.name] * alive
        waited = self._silence.seconds(folder / PLACED, placed.submission, of="ended")
        if sending and waited < LAST_FILES_SECONDS:
            return JobState(state="running", reason=f"{', '.join(sending)} sends its last files")
        try:
            self._mirrored.settle(folder, nodes=len(placed.hosts), well=ended.code == 0)
        except IntegrityError as error:
            return JobState(state="ended", code=error.exit_code, reason=str(error), failure="integrity")
        except HeadwayError as error:
            return JobState(state="unknown", reason=f"{error} {error.remedy}".strip())
        return ended

    def _is_gone(self, placed: Placed, folder: Path, rank: int, look: Look | Missing) -> bool:
        """Whether a machine's part ended without a mark; the beat decides for a machine that does not answer."""
        place = folder / "nodes" / str(rank)
        if (place / "exit.json").exists():
            return False
        quiet = self._silence.of_beat(place / "beat")
        if isinstance(look, Missing):
            return quiet > self._config.watch.silent_node_seconds
        handle = _parent(placed, folder, rank)
        dead = not (handle and look.alive(handle))
        return self._silence.seconds(place, dead, of=placed.submission) > GONE_SECONDS and dead

    def _stop(self, placed: Placed, folder: Path) -> None:
        """Stop a submission everywhere; a machine that does not answer finds in the job folder that it is not wanted."""
        left = self._machines.stop(placed.submission, placed.hosts)
        if left:
            write_json(folder / "job.json", {**(read_json(folder / "job.json") or {}), "submission": 0})
            if self._mirrored:
                self._mirrored.fence(folder)
        for host, why in left.items():
            log.warning(
                "%s was not stopped on machine %s (%s); it stops by itself as soon as that machine reads %s",
                placed.submission,
                host.name,
                why,
                folder,
            )


def _handle(job: Job) -> dict[str, Any]:
    return {"submission": job.submission_id}


def _write(folder: Path, placed: Placed) -> None:
    write_json(folder / PLACED, asdict(placed))


def _read(folder: Path, submission: str) -> Placed | None:
    output = read_json(folder / PLACED)
    if not output or output["submission"] != submission:
        return None
    hosts, failed = tuple(Host(**host) for host in output["hosts"]), tuple(output["failed_nodes"])
    return Placed(**{**output, "hosts": hosts, "failed_nodes": failed, "mirrors": tuple(output.get("mirrors", ()))})


def _from_files(placed: Placed | None, folder: Path, *, mirrored: bool) -> JobState | None:
    """What the job folder alone says; None when the machines have to be asked."""
    if placed is None:
        return JobState(state="lost", reason=f"{folder / PLACED} is gone")
    if placed.stage == "lost":
        return _lost(placed)
    if placed.stage == "refused":
        return _ended_refused(placed.reason)
    if placed.stage == "queued":  # a mark there is of a start that was taken back
        return None
    ended = ended_state(folder)
    if placed.stage == "cancelled":
        return ended or JobState(state="ended", code=143, reason="cancelled")
    return None if mirrored else ended  # a mirror may have files to send


def _vanished(placed: Placed, folder: Path, rank: int, look: Look | Missing) -> bool:
    """Whether the machine itself is gone, or was started again meanwhile."""
    handle = _parent(placed, folder, rank)
    return isinstance(look, Missing) or (handle is not None and handle["boot_id"] != look.boot_id)


def _lost(placed: Placed) -> JobState:
    failure: Failure | None = "node" if placed.failed_nodes else None
    return JobState(state="lost", reason=placed.reason, failure=failure, failed_nodes=placed.failed_nodes)


def _may_pass(answer: Ran | Missing) -> bool:
    """Whether a machine that did not start a job may do so later: it runs another one, or gives no answer now."""
    return isinstance(answer, Unreachable) if isinstance(answer, Missing) else answer.code == BUSY


def _refusal(host: Host, answer: Ran | Missing, folder: Path) -> Missing:
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


def _refused(job: Job, folder: Path, error: NotAccepted) -> JobState:
    """The end of a job that waited, and that a machine refused to start; what to do is said as a program says it."""
    (folder / "errors").mkdir(exist_ok=True)
    report = {"class": "missing", "message": error.message, "remedy": error.remedy, "attempt": 1}
    write_json(folder / "errors" / "node-refused.json", report)
    _write(folder, Placed(job.submission_id, stage="refused", reason=error.message))
    return _ended_refused(error.message)


def _ended_refused(reason: str) -> JobState:
    return JobState(state="ended", code=Missing.exit_code, reason=reason, failure="missing")


def _mirror(answer: Ran | Missing) -> dict[str, Any]:
    """The process that a start script says it started."""
    assert isinstance(answer, Ran)
    pid, started, boot_id = answer.stdout.split()
    return {"pid": int(pid), "started": started, "boot_id": boot_id}


def _parent(placed: Placed, folder: Path, rank: int) -> dict[str, Any] | None:
    """The process that a machine's part lives as long as."""
    if placed.mirrors:
        return placed.mirrors[rank]
    handle: dict[str, Any] | None = read_json(folder / "nodes" / str(rank) / "handle.json")
    return handle


def _too_few(job: Job, room: Room) -> Missing:
    host, error = next(iter(room.out.items()))
    machines = len(room.free) + len(room.busy)
    return Missing(
        f"{job.name} needs {job.nodes} machines, and {machines} can take it; machine {host.name}: {error.message}",
        remedy=f"{error.remedy} Or do without it: cluster.exclude.",
    )
