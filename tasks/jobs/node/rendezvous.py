"""Where the machines of an elastic job meet: the store of torch's rendezvous, held outside of the machines that may go.

`python -m tasks.jobs.node.rendezvous FOLDER` runs under the parent of tasks/common/process.py in `FOLDER/rendezvous`, on the
machine that jobs are submitted from (tasks/compute/elastic.py starts it), or on Ray's head (tasks/jobs/ray/elastic.py), whose
address is then in HEADWAY_RENDEZVOUS_HOST. It writes `rendezvous.json` ({host, port, opening, submission}), which the machines
read (__main__.py), and ends when the job has: its parent's `exit.json` is how the submission ended.
"""

from __future__ import annotations

import os
import pickletools
import socket
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from tasks.common.process import GIVEN_UP, NOT_RETRIED, die_with_parent, read_json, write_json
from tasks.jobs.node.launching import run_id

POLL_SECONDS = 0.5
SILENT_SECONDS = 15.0
"""Three beats of a machine: at the end nobody waits for one that is silent for so long."""
FAREWELL_SECONDS = 30.0
"""Longest time that machines get to leave after the result is there; they need the store for it."""
ENDS_THE_JOB = tuple(kind for kind in NOT_RETRIED if kind not in ("node", "preempted"))
"""Classes of failure that another machine would have too."""


def open_store(port: int) -> TCPStore:
    """The store, on the port that it had before, so that machines which know that one find it; else on a free one."""
    for wanted in (port, 0):
        try:
            return TCPStore("localhost", wanted, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        except RuntimeError:
            if wanted == 0:
                raise
    raise AssertionError("a free port is always tried last")


def closed(store: TCPStore, run: str) -> bool:
    """Whether torch's agents closed the rendezvous for good, as they do when one of them gives up.

    Their state is a pickle (dynamic_rendezvous.py of torch 2.13: `_RendezvousState.closed`). Whoever reaches the port could have
    written it, so it is read here and not loaded, as `is_closed` of torch's own handler would.
    """
    try:
        state = C10dRendezvousBackend(store, run).get_state()
        operations = list(pickletools.genops(state[0])) if state else []
    except (RendezvousStateError, ValueError):
        return False
    after = next((place for place, (_, value, _) in enumerate(operations) if value == "closed"), len(operations))
    flags = [code.name for code, _, _ in operations[after:] if code.name in ("NEWTRUE", "NEWFALSE")]
    return flags[:1] == ["NEWTRUE"]


@dataclass
class Watching:
    """What is seen of the job in its folder. State: the ranks' last start, failures without progress, the machines' beats."""

    folder: Path
    job: dict[str, Any]
    failures: int = 0
    start: Any = None
    progress: bytes = b""
    reports: dict[str, float] = field(default_factory=dict)
    beats: dict[str, tuple[Any, float]] = field(default_factory=dict)

    def ended(self) -> int | None:
        """0 with a result; GIVEN_UP when going on is of no use; None while the job lives."""
        if (self.folder / "result.json").exists():
            return 0
        if (self.folder / "rendezvous" / "over.json").exists():
            return GIVEN_UP
        output = read_json(self.folder / "job.json")
        if output is None or output["submission"] != self.job["submission"]:
            return GIVEN_UP
        self._count()
        reports = (read_json(path) or {} for path in (self.folder / "errors").glob("*.json"))
        if self.failures > int(self.job["restarts"]) or any(r.get("class") in ENDS_THE_JOB for r in reports):
            return GIVEN_UP
        return None

    def _count(self) -> None:
        """A new start of rank 0 after a rank reported a failure counts; a start because a machine came or went does not."""
        progress = self.folder / str(self.job["progress"] or "metrics.jsonl")
        now = progress.read_bytes()[-4096:] if progress.is_file() else b""
        if now != self.progress:
            self.progress, self.failures = now, 0
        rank = read_json(self.folder / "ranks" / "0.json") or {}
        start = (rank.get("host"), rank.get("pid"), rank.get("started"))
        if not rank or start == self.start:
            return
        reports = {path.name: path.stat().st_mtime for path in (self.folder / "errors").glob("rank-*.json")}
        self.failures += self.start is not None and reports != self.reports
        self.start, self.reports = start, reports

    def machines(self) -> int:
        """Machines that are in the job: they show a sign of life, and did not say that they ended."""
        return sum(self._lives(place) for place in (self.folder / "nodes").glob("*"))

    def _lives(self, place: Path) -> bool:
        beat, now = (read_json(place / "beat") or {}).get("time"), time.monotonic()
        before, since = self.beats.get(place.name, (None, now))
        if beat != before:
            self.beats[place.name] = (beat, now)
            since = now
        mark = read_json(place / "node.json") or {}
        mine = mark.get("submission") == self.job["submission"]
        return mine and mark.get("code") is None and now - since < SILENT_SECONDS


def main(folder: Path) -> int:
    """Hold the store until the job ended; returns how it ended."""
    die_with_parent()
    job, place = read_json(folder / "job.json"), folder / "rendezvous" / "rendezvous.json"
    before = read_json(place) or {}
    mine = before.get("submission") == job["submission"]
    store = open_store(int(before["port"]) if mine else 0)
    host = job["elastic"].get("address") or os.environ.get("HEADWAY_RENDEZVOUS_HOST") or host_name()
    output = {"host": host, "port": store.port, "submission": job["submission"]}
    opening = int(before["opening"]) + 1 if mine else 1
    write_json(place, {**output, "opening": opening})
    watching = Watching(folder, job)
    while (code := watching.ended()) is None:
        watching.machines()
        if closed(store, run_id(job, opening)):
            opening += 1
            write_json(place, {**output, "opening": opening})
        time.sleep(POLL_SECONDS)
    began = time.monotonic()
    while code == 0 and watching.machines() and time.monotonic() - began < FAREWELL_SECONDS:
        time.sleep(POLL_SECONDS)
    return code


def host_name() -> str:
    """This machine's name where it can be resolved, else its own loopback address."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
