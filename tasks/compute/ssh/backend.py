"""The ssh backend: plain machines, VMs or a scale set, each with one job at a time, whose home is a shared folder.

With `cluster.mirror` they share none: the job's folder lies in a store (../job_folder.py), and its mirror runs above the parent.

A machine's parent (tasks/common/process.py) outlives the connection and the orchestrator; its handle and marks lie in the job
folder. There is no scheduler: a job whose machines are taken waits as `queued`, and is started by whoever looks at it. Scripts
are in render.py, the host list in hosts.py, what machines are asked in rounds.py, elastic jobs in elastic.py. See docs/ssh.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import OpenFiles
from tasks.common import process
from tasks.common.errors import HeadwayError, IntegrityError, Missing
from tasks.common.process import read_json, write_json, write_text
from tasks.compute.connection import Ran
from tasks.compute.job import Failure, Job, JobState, NotAccepted, Rendered, before_submission
from tasks.compute.job_folder import MirroredFolders, has_listed_output, key_of
from tasks.compute.nodes import ended_state, write_nodes
from tasks.compute.ssh.elastic import SshElastic, handle_of
from tasks.compute.ssh.hosts import Host, read_hosts, usable
from tasks.compute.ssh.render import CHECK_SECONDS, script_path, start_command, start_script
from tasks.compute.ssh.rounds import (
    GONE_SECONDS,
    PLACED,
    Look,
    Machines,
    Placed,
    Silence,
    may_pass,
    read_placed,
    refusal,
    stop_everywhere,
    too_few,
    write_placed,
)
from tasks.config.cluster import ClusterConfig

log = logging.getLogger("headway.compute")
LAST_FILES_SECONDS = 600.0
"""How long mirrors may send what is left after the leader has ended."""


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
        self._elastic = SshElastic(self._hosts, self._machines, self._silence)

    def render(self, job: Job, folder: Path) -> Rendered:
        """The scripts as they are when the first machines of the list are free."""
        if job.elastic:
            return self._elastic.render(job, folder)
        hosts = usable(job, self._hosts)[: job.nodes]
        scripts = [start_script(job, folder, hosts, rank, self._mirrored) for rank in range(job.nodes)]
        files = {f"nodes/{rank}/start.sh": text for rank, text in enumerate(scripts)}
        steps = [{"machine": host.address, "command": start_command(folder, k)} for k, host in enumerate(hosts)]
        return Rendered(backend="ssh", files=files, request={"run": steps})

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        if job.elastic:
            return self._elastic.submit(job, folder)
        usable(job, self._hosts)
        if self._mirrored:
            with before_submission():
                self._mirrored.send(job, folder)
        else:
            write_nodes(job, folder)
        write_placed(folder, Placed(job.submission_id))
        self._place(job, folder)
        return _handle(job)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        """What was placed is found in the folder; what was not, and runs all the same, is stopped, for it is half a job."""
        placed = read_placed(folder, job.submission_id)
        if placed and placed.stage != "starting":
            return _handle(job)
        half = placed.hosts if placed else self._machines.running(job.submission_id, self._hosts)
        for host, why in self._machines.stop(job.submission_id, half).items():
            raise Missing(
                f"{job.submission_id} may run on machine {host.name}: {why}", remedy="Try again when it answers."
            )
        return None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        elastic = [job for job in jobs if "parts" in job[0]]
        whole = iter(self._whole_states([job for job in jobs if "parts" not in job[0]]))
        parted = iter(self._elastic.states(elastic) if elastic else [])
        return [next(parted if "parts" in handle else whole) for handle, _ in jobs]

    def _whole_states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        placed = [read_placed(folder, handle["submission"]) for handle, folder in jobs]
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
        if "parts" in handle:
            self._elastic.cancel(handle, folder)
            return
        with process.locked(folder / "ssh.lock"):
            placed = read_placed(folder, handle["submission"]) or Placed(handle["submission"])
            write_placed(folder, Placed(placed.submission, placed.hosts, "cancelled"))
        self._stop(placed, folder)

    def _place(self, job: Job, folder: Path) -> Placed:
        """Take the first machines that are free and start the job on them; else it stays queued.

        Raises Missing when the machines that answer are too few, whatever they do now.
        """
        room = self._machines.room(job, folder, usable(job, self._hosts), mirrored=self._mirrored is not None)
        if job.nodes > len(room.free) + len(room.busy):
            raise too_few(job, room)
        for host, error in room.out.items():
            log.warning("%s does without machine %s: %s", job.submission_id, host.name, error.message)
        with process.locked(folder / "ssh.lock"):
            now = read_placed(folder, job.submission_id)
            if now and now.stage == "cancelled":
                return now
            busy = ", ".join(f"{host.name} runs {what}" for host, what in room.busy.items())
            placed = Placed(job.submission_id, reason=f"{job.nodes} machines are needed, {len(room.free)} free; {busy}")
            if job.nodes <= len(room.free):
                hosts = tuple(room.free[: job.nodes])
                write_placed(folder, Placed(job.submission_id, hosts, "starting"))
                placed = self._start(job, folder, hosts)
            write_placed(folder, placed)
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
            if not may_pass(answer):
                error = refusal(host, answer, folder)
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
            # The end of a job that waited, and that a machine refused to start; what to do is said as a program says it
            (folder / "errors").mkdir(exist_ok=True)
            report = {"class": "missing", "message": error.message, "remedy": error.remedy, "attempt": 1}
            write_json(folder / "errors" / "node-refused.json", report)
            write_placed(folder, Placed(job.submission_id, stage="refused", reason=error.message))
            return _ended_refused(error.message)
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
        return self._lose(placed, folder, reason, names if vanished else ())

    def _lose(self, placed: Placed, folder: Path, reason: str, nodes: Sequence[str]) -> JobState:
        """Give a job up, stop what is left of it, and say which machines failed."""
        lost = replace(placed, stage="lost", reason=reason, failed_nodes=tuple(nodes))
        write_placed(folder, lost)
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
        """The state of a mirrored job whose leader ended: over once no mirror sends files any more.

        A machine that is silent for too long, and whose output is not all in the store, is lost with it, and the job with them.
        """
        assert self._mirrored
        sending, silent = [], []
        for rank, (host, mirror) in enumerate(zip(placed.hosts, placed.mirrors, strict=True)):
            match looks[host]:
                case Look() as look:
                    alive = look.alive(mirror)
                case _:  # it did not answer, which is no word about its mirror
                    alive = ended.code == 0 and not has_listed_output(folder, rank)
                    quiet = self._silence.of_beat(folder / "nodes" / str(rank) / "beat")
                    silent += [host.name] * (alive and quiet > self._config.watch.silent_node_seconds)
            sending += [host.name] * alive
        if silent:
            (folder / "result.json").unlink(missing_ok=True)  # it speaks of output that nobody has
            return self._lose(
                placed, folder, f"machine {', '.join(silent)} is gone with the last of its output", silent
            )
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
        if stop_everywhere(self._machines, placed, folder) and self._mirrored:
            self._mirrored.fence(folder)


def _handle(job: Job) -> dict[str, Any]:
    return handle_of(job) if job.elastic else {"submission": job.submission_id}


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
