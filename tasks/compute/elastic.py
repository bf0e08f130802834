"""An elastic job: one part for each machine, which join as they start. What Slurm and SSH do the same.

On Ray the job's own driver does it: tasks/jobs/ray/elastic.py.

The first `min_nodes` machines to start begin, the others join them. A machine that is lost comes again. The submission stays the
same until the holder of the rendezvous store says how it ended, or no machine is left. See docs/elastic.md. How a part is
submitted, what its state is and how it ends is the backend's: slurm/elastic.py, ssh/elastic.py.

The holder is a process of the machine that jobs are submitted from: tasks/jobs/node/rendezvous.py. It outlives the orchestrator,
and its `rendezvous/exit.json` is how the submission ended. `rendezvous/parts/K-N.json` is the Nth submission of machine K,
create-only and written before it is sent, so that nobody submits it twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.common import process
from tasks.common.errors import Missing
from tasks.common.process import read_json
from tasks.compute.job import Job, JobState
from tasks.compute.nodes import node_environment, python

RESTARTS = 5
STEADY_SECONDS = 60.0
FIND_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
UNHEARD_SECONDS = 60.0
"""After which a submission that nobody knows of never arrived: its answer was lost, or who sent it died."""
LEAVE_SECONDS = 10.0
"""That machines get to leave by themselves when the job has ended."""


@dataclass(frozen=True)
class Part:
    """One machine of an elastic job."""

    job: Job
    folder: Path
    number: int

    @property
    def place(self) -> Path:
        """Where its agent leaves its marks."""
        return self.folder / "nodes" / str(self.number)

    @property
    def submissions(self) -> Path:
        return self.folder / "rendezvous" / "parts"

    def begin(self) -> bool:
        """Write down that it is submitted now; False when somebody else just did."""
        self.submissions.mkdir(parents=True, exist_ok=True)
        path = self.submissions / f"{self.number}-{len(self._begun()) + 1}.json"
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"time": time.time(), "marker": self._marker()}, file)
        except FileExistsError:
            return False
        return True

    def withdraw(self) -> None:
        """Its last submission was none: the machine took nothing."""
        (self.submissions / f"{self.number}-{len(self._begun())}.json").unlink(missing_ok=True)

    def unheard(self) -> bool:
        """Whether its last submission may still be on its way."""
        last = self._begun()[-1:]
        return bool(last) and time.time() - float(last[0].get("time", 0.0)) < UNHEARD_SECONDS

    def tries(self) -> int:
        """Submissions since the job last got on."""
        now, count = self._marker(), 0
        for submission in reversed(self._begun()):
            if submission.get("marker") != now:
                break
            count += 1
        return count

    def _begun(self) -> list[dict[str, Any]]:
        paths = sorted(
            self.submissions.glob(f"{self.number}-*.json"), key=lambda path: int(path.stem.partition("-")[2])
        )
        return [_read(path) for path in paths]

    def _marker(self) -> str:
        file = self.folder / self.job.progress
        return hashlib.sha256(file.read_bytes()).hexdigest() if self.job.progress and file.is_file() else ""


@dataclass(frozen=True)
class Seen:
    """What a backend knows of a part now."""

    part: Part
    state: Literal["queued", "starting", "running", "ending", "gone"]
    reason: str = ""
    """Of one that is queued: why it waits."""
    over: JobState | None = None
    """Of one that is gone: how it ended; None: it never began, or nobody knows."""
    at: float = 0.0
    """Which of several that are gone was the last."""

    @property
    def alive(self) -> bool:
        return self.state != "gone"


def state_of(
    job: Job,
    folder: Path,
    known: Sequence[Seen],
    *,
    again: Callable[[Sequence[Seen]], int],
    end: Callable[[Sequence[Seen]], None],
) -> JobState:
    """The state of a submission. `again` submits those that are gone once more, where that is of use, and says how many of them
    are on their way; `end` ends parts."""
    alive = [seen for seen in known if seen.alive]
    if ended := ended_state(folder):
        # The job has ended: what waits is not wanted any more, and machines get a moment to leave.
        at = float((read_json(folder / "rendezvous" / "exit.json") or {}).get("ended", 0.0))
        waited = time.time() - at > LEAVE_SECONDS
        end([seen for seen in alive if waited or seen.state == "queued"])
        left = [seen for seen in alive if seen.state == "running"]
        return JobState(state="running", reason="its machines leave") if left and not waited else ended
    if (folder / "result.json").exists():
        if any(seen.state != "queued" for seen in alive):
            return JobState(state="running", reason="its machines leave")
        end(alive)
        process.stop(folder / "rendezvous")
        return JobState(state="ended", code=0, reason="ended", attempts=attempts(folder))
    # Start the holder of the store again where this machine lost it, as by a reboot.
    opened = read_json(folder / "rendezvous" / "opened.json") or {}
    is_local = opened.get("machine") == socket.gethostname()
    if is_local and not process.alive(read_json(folder / "rendezvous" / "handle.json")):
        open_rendezvous(job, folder)
    gone = [seen for seen in known if not seen.alive]
    if over := _over_all(job, folder, alive, coming=again(gone)):
        return over
    # No machine is left and none will come: tell why the last one went.
    process.stop(folder / "rendezvous")
    last = max((seen for seen in gone if seen.over), key=lambda seen: seen.at, default=None)
    over = (last.over if last else None) or JobState(state="lost", reason="nobody knows its machines any more")
    note_end(folder, over)
    return over


def _over_all(job: Job, folder: Path, alive: Sequence[Seen], *, coming: int) -> JobState | None:
    """The state of a job whose machines are at different points; None when none is there or on its way."""
    assert job.elastic
    running = sum(seen.state in ("running", "ending") for seen in alive)
    starting = sum(seen.state == "starting" for seen in alive)
    most = job.elastic.max_nodes
    bad = ", ".join(dict.fromkeys(bad_machines(folder)))
    without = f"; without {bad}, which checks found bad" if bad else ""
    if running:
        fewer = f"{running} of at most {most} machines" if running < most else ""
        return JobState(state="running", reason=f"{fewer}{without}".removeprefix("; "))
    if starting:
        return JobState(state="starting", reason=f"{starting} of at most {most} machines boot or are made ready")
    if alive:
        return JobState(state="queued", reason=f"its machines wait: {alive[0].reason}{without}")
    return JobState(state="queued", reason=f"{coming} machine(s) are submitted again{without}") if coming else None


def bad_machines(folder: Path) -> Iterator[str]:
    """Machines that a check named: while they ran, or before they would have joined."""
    for path in sorted((folder / "errors").glob("node-*.json")):
        report = read_json(path) or {}
        if report.get("class") == "node" and report.get("type") not in ("NodeLost", "NodeMissing"):
            yield from report.get("nodes", [])


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # being written just now
        return {"time": time.time()}


def spec(job: Job, folder: Path) -> process.ProcessSpec:
    """What the parent of the store's holder is told; `folder` is the job's as that machine sees it."""
    return process.ProcessSpec(
        argv=[python(job), "-m", "tasks.jobs.node.rendezvous", str(folder)],
        env=node_environment(job),
        secrets=(),
        log="rendezvous.log",
        restarts=RESTARTS,
        steady=STEADY_SECONDS,
        owner=job.submission_id,
    )


def open_rendezvous(job: Job, folder: Path) -> None:
    """Start the store's holder on this machine; what an earlier submission left of one is gone. It runs on when it runs.

    Raises Missing when Python here has no torch.
    """
    place = folder / "rendezvous"
    if (process.read_json(place / "process.json") or {}).get("owner") != job.submission_id:
        process.stop(place)
        shutil.rmtree(place, ignore_errors=True)
    require_torch(python(job))
    process.start(place, spec(job, folder))
    process.write_json(place / "opened.json", {"machine": socket.gethostname()})


def require_torch(interpreter: str) -> None:
    """Raises Missing when a Python has no torch."""
    try:
        exists = subprocess.run([interpreter, "-c", FIND_TORCH], capture_output=True, check=False).returncode == 0
    except OSError:
        exists = False
    if not exists:
        raise Missing(
            f"an elastic job's machines meet at a store of torch on this machine, and {interpreter} has no torch",
            remedy="Set cluster.python to a Python that has torch, here and on the nodes: pip install -e '.[train]'.",
        )


def ended_state(folder: Path) -> JobState | None:
    """How an elastic submission ended; None while it lives."""
    if noted := process.read_json(folder / "rendezvous" / "over.json"):
        return JobState.model_validate(noted)
    ended = process.read_json(folder / "rendezvous" / "exit.json")
    if not ended:
        return None
    return JobState(state="ended", code=ended["code"], reason=ended["reason"], attempts=attempts(folder))


def note_end(folder: Path, state: JobState) -> None:
    """Write down that a submission ended because no machine was left, which the holder of the store cannot know."""
    process.write_json(folder / "rendezvous" / "over.json", state.model_dump(mode="json"))


def attempts(folder: Path) -> int:
    """The most starts that one machine made."""
    counts = [(process.read_json(path) or {}).get("attempts", 1) for path in (folder / "nodes").glob("*/attempts.json")]
    return max(counts, default=1)
