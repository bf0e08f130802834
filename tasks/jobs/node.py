"""One attempt of a job on one machine: start its ranks, watch over them, and say how it ended.

Every backend runs `python -m tasks.jobs.node FOLDER` once a machine, under the small parent of tasks/process.py, which starts
the next attempt. The machine of node rank 0 leads: it opens an attempt and says where ranks meet; the others follow it. What
starts the ranks is launching.py; the light health checks are probes.py; inputs on a fast local disk are scratch.py.

Environment, set by the backend: HEADWAY_NODE_RANK (0 leads), HEADWAY_NODE_NAME (as the scheduler calls the machine),
HEADWAY_LEADER (the address under which the others reach node rank 0), HEADWAY_RENDEZVOUS (host:port of the store of an elastic
job). See docs/compute.md, "The job folder".
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.jobs.launching import Place, environment, launcher
from tasks.process import die_with_parent, read_json, write_json

POLL_SECONDS = 0.1
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""A machine that has not written its mark for so long is gone: twelve beats, longer than a shared folder's caches (NFS: 60 s at
most for a folder, 3 s for a file that changes often)."""
JOIN_SECONDS = 600.0
"""Longest time that the leader waits for all machines at its first attempt, and later for those that come back."""
GRACE_SECONDS = 10.0
"""For ranks to see that others are gone, before they are ended; and between SIGTERM and SIGKILL."""
FENCED, LEADER_GONE = 76, 77
"""Exit codes: a newer submission has the folder; node rank 0 is silent."""


@dataclass
class Ended:
    """How an attempt ended on this machine."""

    code: int
    lost: tuple[str, ...] = ()
    """Machines that went silent."""


class Node:
    """This machine's part of an attempt. State: the attempt, the launcher, and whether somebody asked to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job: dict[str, Any] = read_json(folder / "job.json")
        self.rank = int(os.environ.get("HEADWAY_NODE_RANK", "0"))
        self.name = os.environ.get("HEADWAY_NODE_NAME") or socket.gethostname()
        self.submission = int(self.job["submission"])
        self.elastic = bool(self.job["elastic"])
        self.place = folder / "nodes" / str(self.rank)
        self.stopping = False
        self.beaten = 0.0
        self.attempt = 0

    def run(self) -> int:
        """One attempt; the launcher's exit code, or one of this module's own."""
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        meeting = self._lead() if self.rank == 0 or self.elastic else self._follow()
        if meeting is None:
            return 0 if self._leader_ended() else LEADER_GONE
        self.attempt = int(meeting["attempt"])
        place = Place(self.rank, str(meeting["address"]), int(meeting["port"]), self.attempt)
        self._mark(code=None)
        starts = self.rank == 0 or self.job["launcher"] != "mpi"
        ended = self._attend(self._start(place) if starts else None)
        self._mark(code=ended.code)
        for lost in ended.lost:
            self._report_lost(lost)
        return ended.code

    def _lead(self) -> dict[str, Any]:
        """Open an attempt: its number, and where ranks meet."""
        attempt = int(os.environ.get("HEADWAY_ATTEMPT", "1"))
        address = os.environ.get("HEADWAY_LEADER") or "127.0.0.1"
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        meeting = {"attempt": attempt, "address": address, "port": port, "submission": self.submission}
        if self.rank == 0:
            write_json(self.folder / "attempt.json", meeting)
        return meeting

    def _follow(self) -> dict[str, Any] | None:
        """The leader's next attempt; None when it ended or is silent."""
        mine = read_json(self.place / "node.json") or {}
        last = int(mine.get("attempt", 0)) if mine.get("submission") == self.submission else 0
        began = time.monotonic()
        while not self.stopping:
            self._beat()
            said = read_json(self.folder / "attempt.json") or {}
            if said.get("submission") == self.submission and int(said["attempt"]) > last:
                return dict(said)
            silent = time.monotonic() - began > JOIN_SECONDS and not said
            if self._leader_ended() or silent or (said and 0 in self._silent()):
                return None
            time.sleep(POLL_SECONDS)
        return None

    def _start(self, place: Place) -> subprocess.Popen[bytes]:
        with open(self.folder / "launcher.log", "ab") as log:
            return subprocess.Popen(
                launcher(self.job, place),
                env={**os.environ, **environment(self.job, self.folder, place)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def _attend(self, child: subprocess.Popen[bytes] | None) -> Ended:
        """Wait for the launcher's end, or end it: when asked to stop, when another machine failed, when one is silent."""
        doomed: float | None = None
        lost: tuple[str, ...] = ()
        while child is None or child.poll() is None:
            time.sleep(POLL_SECONDS)
            self._beat()
            if child is None and (self._leader_ended() or self._newer_attempt()):
                return Ended(0)
            if self._fenced():
                return Ended(self._end(child) or FENCED)
            lost = lost or tuple(str(self._name_of(rank)) for rank in self._silent())
            if doomed is None and (lost or self._other_failed() or self._newer_attempt()):
                doomed = time.monotonic() + GRACE_SECONDS
            if self.stopping or (doomed is not None and time.monotonic() > doomed):
                return Ended(self._end(child) or 1, lost)
        return Ended(child.returncode, lost)

    def _end(self, child: subprocess.Popen[bytes] | None) -> int:
        if child is None:
            return 0
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return child.returncode

    def _mark(self, *, code: int | None) -> None:
        """Say where this machine is; `code` is of its launcher in this attempt, None while it runs."""
        me = {"rank": self.rank, "name": self.name, "host": socket.gethostname(), "pid": os.getpid()}
        state = {"attempt": self.attempt, "submission": self.submission, "code": code, "time": time.time()}
        write_json(self.place / "node.json", {**me, **state})
        self.beaten = time.monotonic()

    def _beat(self) -> None:
        if time.monotonic() - self.beaten > BEAT_SECONDS:
            (self.place / "beat").parent.mkdir(parents=True, exist_ok=True)
            write_json(self.place / "beat", {"time": time.time(), "submission": self.submission})
            self.beaten = time.monotonic()

    def _others(self) -> list[int]:
        """Node ranks that this machine watches: the leader all others, the others the leader."""
        if self.elastic or int(self.job["nodes"]) == 1:
            return []
        return list(range(1, int(self.job["nodes"]))) if self.rank == 0 else [0]

    def _silent(self) -> list[int]:
        """Node ranks whose beat did not change for too long, by this machine's own clock."""
        now, found = time.monotonic(), []
        for rank in self._others():
            seen = (read_json(self.folder / "nodes" / str(rank) / "beat") or {}).get("time", 0.0)
            before, since = _beats.get(rank, (None, now))
            if seen != before:
                _beats[rank] = (seen, now)
            elif now - since > (SILENT_SECONDS if seen else JOIN_SECONDS):
                found.append(rank)
        return found

    def _other_failed(self) -> bool:
        marks = [read_json(self.folder / "nodes" / str(rank) / "node.json") or {} for rank in self._others()]
        mine = [m for m in marks if m.get("submission") == self.submission and m.get("attempt") == self.attempt]
        return any(mark["code"] not in (None, 0) for mark in mine)

    def _newer_attempt(self) -> bool:
        said = read_json(self.folder / "attempt.json") or {}
        return not self.elastic and said.get("submission") == self.submission and int(said["attempt"]) > self.attempt

    def _leader_ended(self) -> bool:
        return self.rank != 0 and (self.folder / "nodes" / "0" / "exit.json").exists()

    def _fenced(self) -> bool:
        said = read_json(self.folder / "job.json")
        return said is None or int(said["submission"]) != self.submission

    def _name_of(self, rank: int) -> str:
        said = read_json(self.folder / "nodes" / str(rank) / "node.json") or {}
        return str(said.get("name", f"node rank {rank}"))

    def _report_lost(self, name: str) -> None:
        report = {"type": "NodeLost", "message": f"machine {name} went silent", "remedy": "", "class": "node"}
        (self.folder / "errors").mkdir(exist_ok=True)
        write_json(self.folder / "errors" / f"node-{name}.json", {**report, "attempt": self.attempt, "nodes": [name]})

    def _ask_to_stop(self, *_: object) -> None:
        self.stopping = True


_beats: dict[int, tuple[float | None, float]] = {}
"""Per node rank: the last beat seen, and when it was first seen by this machine's clock."""


def main(folder: Path) -> int:
    """Run one attempt; the ranks die with this process. A launcher that signal N ended gives 128 + N, as in a shell."""
    die_with_parent()
    code = Node(folder).run()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
