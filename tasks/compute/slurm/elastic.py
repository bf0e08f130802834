"""An elastic job on Slurm: one job of one node for each machine, which join as the scheduler starts them.

All are submitted at once; the first `min_nodes` to start begin, the others join them. A machine that is lost comes again: queued
by Slurm itself, or submitted again from here, without the machines that a health check named. The submission stays the same until
the holder of the rendezvous store says how it ended, or no machine is left. See docs/elastic.md.

The holder is a process of the machine that jobs are submitted from: tasks/jobs/node/rendezvous.py. It outlives the orchestrator,
and its `rendezvous/exit.json` is how the submission ended.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import HeadwayError, JobFailed, Missing
from tasks.common.process import read_json
from tasks.compute.job import Job, JobState, Rendered
from tasks.compute.nodes import node_environment, python, write_nodes
from tasks.compute.slurm import errors, render
from tasks.compute.slurm.commands import Here, Login, NoAnswer, Said, silent
from tasks.compute.slurm.render import WARNED
from tasks.compute.slurm.states import ENDS, QUEUED, Row, parse_squeue
from tasks.config.backends.slurm import SlurmConfig

# The machines of an elastic job as Slurm's jobs of one node each: their names, scripts, and how often each was
# submitted.
#
# `rendezvous/parts/K-N.json` is the Nth submission of machine K, create-only and written before sbatch is called, so
# that nobody submits it twice; `K.job` is the job that has the part.


RESTARTS = 5
STEADY_SECONDS = 60.0
FIND_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
UNHEARD_SECONDS = 60.0
"""After which a submission that nobody knows of never arrived: its answer was lost, or who sent it died."""
STARTING = ("CONFIGURING", "POWER_UP_NODE")
ALIVE = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED", *STARTING, *QUEUED)


@dataclass(frozen=True)
class Part:
    """One machine of an elastic job."""

    job: Job
    folder: Path
    number: int

    @property
    def name(self) -> str:
        """As Slurm knows it."""
        return f"{self.job.submission_id}.e{self.number}"

    @property
    def file(self) -> str:
        return f"part-{self.number}.sbatch"

    def script(self, config: SlurmConfig, seen: Path) -> str:
        """Its batch script; `seen` is the job folder as the nodes see it."""
        one = self.job.model_copy(update={"nodes": 1})
        log = shlex.quote(f"{str(seen).replace('%', '%%')}/part-{self.number}.log")
        own = {"--job-name": f"--job-name={self.name}", "--output": f"--output={log}"}
        options = (own.get(option.partition("=")[0], option) for option in render.options(one, config, seen))
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options if option), ""]
        lines += [*render.setting(one, config, seen), f"part={self.number}"]
        body = resources.files("tasks.compute.slurm").joinpath("elastic_body.sh").read_text(encoding="utf-8")
        step = " \\\n    ".join(render.srun(one, config, seen, rank=str(self.number)))
        return "\n".join([*lines, "", body.replace("@SRUN@", step)])

    def begin(self) -> bool:
        """Write down that it is submitted now; False when somebody else just did."""
        place = self.folder / "rendezvous" / "parts"
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{self.number}-{len(self._submissions()) + 1}.json"
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"time": time.time(), "marker": self._marker()}, file)
        except FileExistsError:
            return False
        (place / f"{self.number}.job").unlink(missing_ok=True)
        return True

    def unheard(self) -> bool:
        """Whether its last submission may still be on its way."""
        last = self._submissions()[-1:]
        return bool(last) and time.time() - float(last[0].get("time", 0.0)) < UNHEARD_SECONDS

    def tries(self) -> int:
        """Submissions since the job last got on."""
        now, count = self._marker(), 0
        for submission in reversed(self._submissions()):
            if submission.get("marker") != now:
                break
            count += 1
        return count

    def _submissions(self) -> list[dict[str, Any]]:
        paths = sorted((self.folder / "rendezvous" / "parts").glob(f"{self.number}-*.json"), key=_number)
        return [_read(path) for path in paths]

    def _marker(self) -> str:
        file = self.folder / self.job.progress
        return hashlib.sha256(file.read_bytes()).hexdigest() if self.job.progress and file.is_file() else ""


def parts_of(job: Job, folder: Path) -> list[Part]:
    """All machines that a job may have."""
    assert job.elastic
    return [Part(job, folder, number) for number in range(job.elastic.max_nodes)]


def newest(rows: list[Row], part: Part) -> Row | None:
    """What Slurm knows of a part: of those that live, else of all, the last one."""
    mine = sorted((row for row in rows if row.name == part.name and not row.refused), key=lambda row: int(row.job))
    return next((row for row in reversed(mine) if row.state in ALIVE), mine[-1] if mine else None)


def bad_machines(folder: Path) -> Iterator[str]:
    """Machines that a health check named."""
    for path in sorted((folder / "errors").glob("node-*.json")):
        report = read_json(path) or {}
        if report.get("class") == "node" and report.get("type") not in ("NodeLost", "NodeMissing"):
            yield from report.get("nodes", [])


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # being written just now
        return {"time": time.time()}


LEAVE_SECONDS = 10.0
"""That machines get to leave by themselves when the job has ended."""
CANCEL_ROUNDS = 5


class SlurmElastic:
    """The elastic jobs of a Slurm cluster. `squeue` makes the command that asks Slurm for jobs."""

    def __init__(self, config: SlurmConfig, login: Login, squeue: Callable[..., tuple[str, ...]]) -> None:
        self._config, self._login, self._squeue = config, login, squeue

    def render(self, job: Job, folder: Path) -> Rendered:
        files = {part.file: part.script(self._config, self._login.seen(folder)) for part in parts_of(job, folder)}
        return Rendered(
            backend="slurm", command=("sbatch", "--parsable", f"{self._login.seen(folder)}/part-N.sbatch"), files=files
        )

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        """Open the rendezvous, then submit every machine. What Slurm refuses beyond `min_nodes` is tried again later."""
        if not isinstance(self._login, Here):
            raise ValueError(
                "an elastic job's machines meet on the login node: run Headway there and leave slurm.login empty"
            )
        partitions = errors.parse_partitions(self._login.run(errors.PARTITIONS).out)
        errors.require_limits(job.model_copy(update={"nodes": 1}), self._config, partitions)
        write_nodes(job, folder)
        open_rendezvous(job, folder)
        process.write_json(folder / "rendezvous" / "opened.json", {"machine": socket.gethostname()})
        for part in parts_of(job, folder):
            self._submit_at_first(part)
        return _handle(job)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        """The handle when Slurm has any of its machines; those that are missing are submitted by `states`."""
        names = {part.name for part in parts_of(job, folder)}
        return _handle(job) if names & {row.name for row in self._rows([_handle(job)])} else None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        try:
            rows = self._rows([handle for handle, _ in jobs])
        except NoAnswer as error:
            return [JobState(state="unknown", reason=error.message) for _ in jobs]
        return [self._state(folder, rows) for _, folder in jobs]

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        """End the rendezvous first, so that no machine comes again, then all machines."""
        process.stop(folder / "rendezvous")
        for _ in range(CANCEL_ROUNDS):
            if not (alive := [row for row in self._rows([handle]) if row.state in ALIVE and row.state != "COMPLETING"]):
                return
            self._end(alive)

    def _rows(self, handles: Sequence[dict[str, Any]]) -> list[Row]:
        """What Slurm knows of all their machines, by one call."""
        names = [f"{handle['name']}.e{number}" for handle in handles for number in range(handle["parts"])]
        output = self._login.run(self._squeue("--me", f"--name={','.join(names)}"))
        if output.code:
            raise silent(output.text)
        return parse_squeue(output.out)

    def _state(self, folder: Path, rows: list[Row]) -> JobState:
        payload = process.read_json(folder / "job.json")
        if payload is None:
            return JobState(state="lost", reason=f"{folder} is gone")
        job = Job.model_validate(payload)
        known = [(part, newest(rows, part)) for part in parts_of(job, folder)]
        alive = [row for _, row in known if row and row.state in ALIVE]
        if ended := ended_state(folder):
            # The job has ended: what waits is not wanted any more, and machines get a moment to leave.
            at = float((process.read_json(folder / "rendezvous" / "exit.json") or {}).get("ended", 0.0))
            waited = time.time() - at > LEAVE_SECONDS
            self._end([row for row in alive if waited or row.state in QUEUED])
            left = [row for row in alive if row.state == "RUNNING"]
            return JobState(state="running", reason="its machines leave") if left and not waited else ended
        if (folder / "result.json").exists():
            if any(row.state not in QUEUED for row in alive):
                return JobState(state="running", reason="its machines leave")
            self._end(alive)
            process.stop(folder / "rendezvous")
            return JobState(state="ended", code=0, reason="ended", attempts=attempts(folder))
        # Start the holder of the store again where this machine lost it, as by a reboot.
        opened = process.read_json(folder / "rendezvous" / "opened.json") or {}
        is_local = opened.get("machine") == socket.gethostname()
        if is_local and not process.alive(process.read_json(folder / "rendezvous" / "handle.json")):
            open_rendezvous(job, folder)
        again = [part for part, row in known if row not in alive and self._again(part, row)]
        return _over_all(alive, len(again), len(known)) or self._nobody_left([row for _, row in known if row], folder)

    def _again(self, part: Part, row: Row | None) -> bool:
        """Submit a machine that is gone once more, where that is of use; whether it is on its way."""
        if row and (row.state in ("TIMEOUT", "DEADLINE", "CANCELLED") or row.code == WARNED):
            return False
        if row is None and part.unheard():
            return True
        if part.tries() > part.job.restarts:
            return False
        excluded = {*part.job.excluded_nodes, *bad_machines(part.folder)}
        job = part.job.model_copy(update={"excluded_nodes": tuple(sorted(excluded))})
        try:
            return self._submit(Part(job, part.folder, part.number)) is None
        except HeadwayError:  # no answer, or refused now: asked again at the next look
            return True
        except ValueError:  # Slurm has none of the machines that it may run on any more
            return False

    def _submit(self, part: Part) -> Said | None:
        """Submit one machine; what Slurm said when it refused."""
        part = Part(errors.restricted(part.job, self._config, self._login), part.folder, part.number)
        if not part.begin():
            return None
        process.write_text(part.folder / part.file, part.script(self._config, self._login.seen(part.folder)))
        output = self._login.run(("sbatch", "--parsable", f"{self._login.seen(part.folder)}/{part.file}"))
        return output if output.code else None

    def _submit_at_first(self, part: Part) -> None:
        assert part.job.elastic
        try:
            refused = self._submit(part)
        except NoAnswer:  # it may have arrived: `states` sees it, or submits it after a while
            return
        if refused and part.number < part.job.elastic.min_nodes:
            process.stop(part.folder / "rendezvous")
            raise errors.refusal(refused, part.job, self._config, self._login)

    def _nobody_left(self, rows: list[Row], folder: Path) -> JobState:
        """No machine is there and none will come: why the last one went."""
        process.stop(folder / "rendezvous")
        last = max(rows, key=lambda row: int(row.job), default=None)
        if last is None:
            over = JobState(state="lost", reason="Slurm does not know its machines any more")
        else:
            failure, words = ENDS.get(last.state, (None, last.state))
            if last.code == WARNED:
                failure, words = "timeout", "timeout: told to save and end before the time limit"
            over = JobState(state="ended", code=last.code or 1, reason=words, failure=failure)
        note_end(folder, over)
        return over

    def _end(self, rows: list[Row]) -> None:
        if not rows:
            return
        output = self._login.run(("scancel", *(row.id for row in rows)))
        if output.code and "invalid job id" not in output.text.lower():
            raise JobFailed(f"scancel: {output.text}", failure="infrastructure", folder="")


def _over_all(alive: list[Row], coming: int, most: int) -> JobState | None:
    """The state of a job whose machines are at different points; None when none is there or on its way."""
    running = sum(row.state not in (*QUEUED, *STARTING) for row in alive)
    starting = sum(row.state in STARTING for row in alive)
    if running:
        return JobState(state="running", reason=f"{running} of at most {most} machines" if running < most else "")
    if starting:
        return JobState(state="starting", reason=f"{starting} of at most {most} machines boot or are made ready")
    if alive:
        return JobState(state="queued", reason=f"its machines wait: {alive[0].reason}")
    return JobState(state="queued", reason=f"{coming} machine(s) are submitted again") if coming else None


def _handle(job: Job) -> dict[str, Any]:
    assert job.elastic
    return {"name": job.submission_id, "submission": job.submission, "parts": job.elastic.max_nodes}


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


def write_rendezvous(job: Job, folder: Path, *, seen: Path) -> None:
    """Write what `python -m tasks.common.process SEEN/rendezvous` needs on another machine, where the folder is `seen`."""
    process.write_json(folder / "rendezvous" / "process.json", asdict(spec(job, seen)))


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
