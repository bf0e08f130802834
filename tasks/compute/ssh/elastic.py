"""An elastic job on the machines of a host list: each is one part of it, and joins when it answers and is free.

Part K is always machine K of the list that the submission began with (`ssh.json`), those first that qualified before. At most
`max_nodes` run at a time, the others are spares. Whoever looks at the job starts what is missing: a machine that was away, that
ran another job, or whose processes are gone. One that a check named stays out. What every elastic job does is ../elastic.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import Missing
from tasks.common.process import read_json, write_text
from tasks.compute.elastic import Part, Seen, bad_machines, ended_state, open_rendezvous, state_of
from tasks.compute.job import Job, JobState, Rendered
from tasks.compute.nodes import write_nodes
from tasks.compute.ssh.hosts import Host, usable
from tasks.compute.ssh.render import script_path, start_command, start_script
from tasks.compute.ssh.rounds import (
    GONE_SECONDS,
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

log = logging.getLogger("headway.compute")
AGAIN_SECONDS = 15.0
"""Between two looks at a machine that gives no answer, and between two at what could join."""
OF_A_START = ("exit.json", "handle.json", "node.json", "beat")
"""Marks of a part's start, which are not those of the next one."""


class SshElastic:
    """Elastic jobs. State: which machines are away, by this machine's clock, and when each job last looked for more."""

    def __init__(self, hosts: Sequence[Host], machines: Machines, silence: Silence) -> None:
        self._hosts, self._machines, self._silence = hosts, machines, silence
        self._away: dict[Host, tuple[float, Missing]] = {}
        self._looked: dict[Path, float] = {}

    def render(self, job: Job, folder: Path) -> Rendered:
        """The scripts of all machines that may become part of it."""
        hosts = _in_order(job, usable(job, self._hosts))
        files = {f"nodes/{k}/start.sh": start_script(job, folder, hosts, k) for k in range(len(hosts))}
        steps = [{"machine": host.address, "command": start_command(folder, k)} for k, host in enumerate(hosts)]
        return Rendered(backend="ssh", files=files, request={"run": steps})

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        """Open the rendezvous, then start what is free. Raises Missing when the machines that answer are fewer than `min_nodes`,
        whatever they do now, and when none of those that are free would start it."""
        hosts = _in_order(job, usable(job, self._hosts))
        write_nodes(job, folder, machines=len(hosts))
        room = self._machines.room(job, folder, hosts)
        if job.fewest_nodes > len(room.free) + len(room.busy):
            raise too_few(job, room)
        for host, error in room.out.items():
            log.warning("%s begins without machine %s: %s", job.submission_id, host.name, error.message)
        open_rendezvous(job, folder)
        placed = Placed(job.submission_id, tuple(hosts), "starting")
        chosen = [hosts.index(host) for host in room.free][: _most(job)]
        with process.locked(folder / "ssh.lock"):
            write_placed(folder, placed)
            refused = self._start(job, placed, folder, chosen)
            if refused and len(refused) == len(chosen):
                process.stop(folder / "rendezvous")
                raise refused[0]
            write_placed(folder, replace(placed, stage="started"))
        return handle_of(job)

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        placed = [read_placed(folder, handle["submission"]) for handle, folder in jobs]
        looks = self._look([(p, folder) for p, (_, folder) in zip(placed, jobs, strict=True) if p])
        return [self._state(p, folder, looks) for p, (_, folder) in zip(placed, jobs, strict=True)]

    def cancel(self, handle: Mapping[str, Any], folder: Path) -> None:
        """End the rendezvous first, so that no machine comes again, then all machines."""
        with process.locked(folder / "ssh.lock"):
            placed = replace(
                read_placed(folder, handle["submission"]) or Placed(handle["submission"]), stage="cancelled"
            )
            write_placed(folder, placed)
        process.stop(folder / "rendezvous")
        stop_everywhere(self._machines, placed, folder)

    def _look(self, jobs: Sequence[tuple[Placed, Path]]) -> dict[Host, Look | Missing]:
        """One round for all jobs; a machine that is away is asked every so often."""
        now = time.monotonic()
        pids: dict[Host, list[int]] = {host: [] for placed, _ in jobs for host in placed.hosts}
        for placed, folder in jobs:
            for number, host in enumerate(placed.hosts):
                handle = read_json(folder / "nodes" / str(number) / "handle.json")
                pids[host] += [int(handle["pid"])] if handle else []
        silent = {host: error for host, (at, error) in self._away.items() if now - at < AGAIN_SECONDS}
        looks = self._machines.look({host: asked for host, asked in pids.items() if host not in silent})
        for host, look in looks.items():
            if isinstance(look, Missing):
                self._away[host] = (time.monotonic(), look)
            else:
                self._away.pop(host, None)
        return {**{host: error for host, error in silent.items() if host in pids}, **looks}

    def _state(self, placed: Placed | None, folder: Path, looks: Mapping[Host, Look | Missing]) -> JobState:
        payload = read_json(folder / "job.json")
        if placed is None or payload is None:
            return JobState(state="lost", reason=f"what {folder} had of the job is gone")
        if placed.stage == "cancelled":
            return ended_state(folder) or JobState(state="ended", code=143, reason="cancelled")
        job = Job.model_validate(payload)
        known = [self._seen(Part(job, folder, number), host, looks[host]) for number, host in enumerate(placed.hosts)]

        def again(gone: Sequence[Seen]) -> int:
            may = [seen.part for seen in gone if _may_come(seen, placed, looks)]
            room = _most(job) - (len(known) - len(gone))
            answering = [part.number for part in may if isinstance(looks[placed.hosts[part.number]], Look)]
            if room > 0 and answering and time.monotonic() - self._looked.get(folder, float("-inf")) > AGAIN_SECONDS:
                self._looked[folder] = time.monotonic()
                self._take_in(job, placed, folder, answering, most=room)
            return len(may)

        def end(ending: Sequence[Seen]) -> None:
            self._machines.stop(placed.submission, [placed.hosts[seen.part.number] for seen in ending])

        return state_of(job, folder, known, again=again, end=end)

    def _seen(self, part: Part, host: Host, look: Look | Missing) -> Seen:
        """A part by its marks; its beat decides where the machine does not answer."""
        owner, ended, handle = part.job.submission_id, *(read_json(part.place / name) for name in OF_A_START[:2])
        if ended and ended.get("owner") == owner:
            over = JobState(state="ended", code=ended["code"] or 1, reason=ended["reason"], attempts=ended["attempts"])
            return Seen(part, "gone", over=over, at=float(ended["ended"]))
        if not handle or handle.get("owner") != owner:
            return Seen(part, "gone")
        quiet = self._silence.of_beat(part.place / "beat")
        if isinstance(look, Missing):
            lost = quiet > part.job.watch.silent_node_seconds
            reason = f"machine {host.name} is gone: no answer, and no sign of life in the job folder"
        else:
            dead = not look.alive(handle)
            lost = self._silence.seconds(part.place, dead, of=owner) > GONE_SECONDS and dead
            reason = f"the parent process on {host.name} ended without a result"
        if lost:
            return Seen(
                part, "gone", over=JobState(state="lost", reason=reason, failure="node", failed_nodes=(host.name,))
            )
        # Before its first mark it measures itself, or waits for the rendezvous.
        return Seen(part, "running" if (part.place / "node.json").exists() else "starting")

    def _take_in(self, job: Job, placed: Placed, folder: Path, numbers: Sequence[int], *, most: int) -> None:
        """Start parts on machines that are free, unless the job was cancelled meanwhile."""
        with process.locked(folder / "ssh.lock"):
            now = read_placed(folder, placed.submission)
            if now is None or now.stage == "cancelled":
                return
            room = self._machines.room(job, folder, [placed.hosts[number] for number in numbers])
            free = [number for number in numbers if placed.hosts[number] in room.free]
            for error in self._start(job, placed, folder, free[:most]):
                log.warning("%s does without a machine: %s", job.submission_id, error.message)

    def _start(self, job: Job, placed: Placed, folder: Path, numbers: Sequence[int]) -> list[Missing]:
        """Start parts; why, for each whose machine refused it. One that is taken or away was not tried, and is asked again."""
        began: dict[Host, Part] = {}
        for part in (Part(job, folder, number) for number in numbers):
            if part.begin():
                for name in OF_A_START:
                    (part.place / name).unlink(missing_ok=True)
                write_text(script_path(folder, part.number), start_script(job, folder, placed.hosts, part.number))
                began[placed.hosts[part.number]] = part
        answers = self._machines.round({host: start_command(folder, part.number) for host, part in began.items()})
        failed = {host: answer for host, answer in answers.items() if isinstance(answer, Missing) or answer.code}
        passing = [host for host, answer in failed.items() if may_pass(answer)]
        for host in passing:
            began[host].withdraw()
        return [refusal(host, answer, folder) for host, answer in failed.items() if host not in passing]


def handle_of(job: Job) -> dict[str, Any]:
    return {"submission": job.submission_id, "parts": _most(job)}


def _most(job: Job) -> int:
    assert job.elastic
    return job.elastic.max_nodes


def _in_order(job: Job, hosts: Sequence[Host]) -> list[Host]:
    """Those first that qualified before the job: they begin at once."""
    proven = job.admission.proven if job.admission else ()
    return sorted(hosts, key=lambda host: host.name not in proven)


def _may_come(seen: Seen, placed: Placed, looks: Mapping[Host, Look | Missing]) -> bool:
    """Whether a machine that is gone may come again.

    Not one that a check found bad, that was started too often without progress, or whose part reached its time limit; one whose
    part was cancelled only after a reboot.
    """
    part, host = seen.part, placed.hosts[seen.part.number]
    if host.name in bad_machines(part.folder) or part.tries() > part.job.restarts:
        return False
    reason = seen.over.reason if seen.over else ""
    if reason == "cancelled":
        handle, look = read_json(part.place / "handle.json") or {}, looks[host]
        return isinstance(look, Missing) or handle.get("boot_id") != look.boot_id
    return reason != "timeout"
