"""An elastic job on Slurm: one job of one node for each machine, which join as the scheduler starts them.

All are submitted at once. A machine that is lost comes again: queued by Slurm itself, or submitted again from here, without the
machines that a check named. What every elastic job does is tasks/compute/elastic.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import HeadwayError, JobFailed
from tasks.compute.elastic import Part, Seen, bad_machines, open_rendezvous, state_of
from tasks.compute.job import Job, JobState, Rendered
from tasks.compute.nodes import write_nodes
from tasks.compute.slurm import render, states
from tasks.compute.slurm.commands import Here, Login, NoAnswer, Said, silent
from tasks.compute.slurm.render import WARNED
from tasks.compute.slurm.states import ENDS, QUEUED, Row, parse_squeue
from tasks.config.backends.slurm import SlurmConfig

# The machines of an elastic job as Slurm's jobs of one node each: their names and scripts. `rendezvous/parts/K.job` is the job
# that has part K, where a submission whose answer was lost was sent again.


STARTING = ("CONFIGURING", "POWER_UP_NODE")
ALIVE = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "SUSPENDED", "STOPPED", *STARTING, *QUEUED)
STAYS_AWAY = ("TIMEOUT", "DEADLINE", "CANCELLED")
"""Ends after which a part is not submitted again."""


def name_of(part: Part) -> str:
    """A part as Slurm knows it."""
    return f"{part.job.submission_id}.e{part.number}"


def file_of(part: Part) -> str:
    return f"part-{part.number}.sbatch"


def script_of(part: Part, config: SlurmConfig, seen: Path) -> str:
    """A part's batch script; `seen` is the job folder as the nodes see it."""
    one = part.job.model_copy(update={"nodes": 1})
    log = shlex.quote(f"{str(seen).replace('%', '%%')}/part-{part.number}.log")
    own = {"--job-name": f"--job-name={name_of(part)}", "--output": f"--output={log}"}
    options = (own.get(option.partition("=")[0], option) for option in render.options(one, config, seen))
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options if option), ""]
    lines += [*render.setting(one, config, seen), f"part={part.number}"]
    body = resources.files("tasks.compute.slurm").joinpath("elastic_body.sh").read_text(encoding="utf-8")
    step = " \\\n    ".join(render.srun(one, config, seen, rank=str(part.number)))
    return "\n".join([*lines, "", body.replace("@SRUN@", step)])


def parts_of(job: Job, folder: Path) -> list[Part]:
    """All machines that a job may have."""
    assert job.elastic
    return [Part(job, folder, number) for number in range(job.elastic.max_nodes)]


def newest(rows: list[Row], part: Part) -> Row | None:
    """What Slurm knows of a part: of those that live, else of all, the last one."""
    mine = sorted((row for row in rows if row.name == name_of(part) and not row.refused), key=lambda row: int(row.job))
    return next((row for row in reversed(mine) if row.state in ALIVE), mine[-1] if mine else None)


def seen_of(part: Part, row: Row | None) -> Seen:
    """A part, by what Slurm says of its newest job."""
    if row is None:
        return Seen(part, "gone")
    if row.state in QUEUED:
        return Seen(part, "queued", row.reason)
    if row.state in ALIVE:
        return Seen(part, "starting" if row.state in STARTING else "running" if row.state == "RUNNING" else "ending")
    failure, words = ENDS.get(row.state, (None, row.state))
    if row.code == WARNED:
        failure, words = "timeout", "timeout: told to save and end before the time limit"
    over = JobState(state="ended", code=row.code or 1, reason=words, failure=failure)
    return Seen(part, "gone", over=over, at=float(row.job))


CANCEL_ROUNDS = 5


class SlurmElastic:
    """The elastic jobs of a Slurm cluster. `squeue` makes the command that asks Slurm for jobs."""

    def __init__(self, config: SlurmConfig, login: Login, squeue: Callable[..., tuple[str, ...]]) -> None:
        self._config, self._login, self._squeue = config, login, squeue

    def render(self, job: Job, folder: Path) -> Rendered:
        seen = self._login.seen(folder)
        files = {file_of(part): script_of(part, self._config, seen) for part in parts_of(job, folder)}
        return Rendered(backend="slurm", command=("sbatch", "--parsable", f"{seen}/part-N.sbatch"), files=files)

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        """Open the rendezvous, then submit every machine. What Slurm refuses beyond `min_nodes` is tried again later."""
        if not isinstance(self._login, Here):
            raise ValueError(
                "an elastic job's machines meet on the login node: run Headway there and leave slurm.login empty"
            )
        partitions = states.parse_partitions(self._login.run(states.PARTITIONS).out)
        states.require_limits(job.model_copy(update={"nodes": 1}), self._config, partitions)
        write_nodes(job, folder)
        open_rendezvous(job, folder)
        for part in parts_of(job, folder):
            assert part.job.elastic
            try:
                refused = self._submit(part)
            except NoAnswer:  # it may have arrived: `states` sees it, or submits it after a while
                continue
            if refused and part.number < part.job.elastic.min_nodes:
                process.stop(part.folder / "rendezvous")
                raise states.refusal(refused, part.job, self._config, self._login)
        return _handle(job)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        """The handle when Slurm has any of its machines; those that are missing are submitted by `states`."""
        names = {name_of(part) for part in parts_of(job, folder)}
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
        newest_rows = {part.number: newest(rows, part) for part in parts_of(job, folder)}
        known = [seen_of(part, newest_rows[part.number]) for part in parts_of(job, folder)]

        def again(gone: Sequence[Seen]) -> int:
            return sum(self._again(seen.part, newest_rows[seen.part.number]) for seen in gone)

        def end(ending: Sequence[Seen]) -> None:
            self._end([row for seen in ending if (row := newest_rows[seen.part.number])])

        return state_of(job, folder, known, again=again, end=end)

    def _again(self, part: Part, row: Row | None) -> bool:
        """Submit a machine that is gone once more, where that is of use; whether it is on its way."""
        if row and (row.state in STAYS_AWAY or row.code == WARNED):
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
        part = Part(states.restricted(part.job, self._config, self._login), part.folder, part.number)
        if not part.begin():
            return None
        (part.submissions / f"{part.number}.job").unlink(missing_ok=True)
        seen = self._login.seen(part.folder)
        process.write_text(part.folder / file_of(part), script_of(part, self._config, seen))
        output = self._login.run(("sbatch", "--parsable", f"{seen}/{file_of(part)}"))
        return output if output.code else None

    def _end(self, rows: list[Row]) -> None:
        if not rows:
            return
        output = self._login.run(("scancel", *(row.id for row in rows)))
        if output.code and "invalid job id" not in output.text.lower():
            raise JobFailed(f"scancel: {output.text}", failure="infrastructure", folder="")


def _handle(job: Job) -> dict[str, Any]:
    assert job.elastic
    return {"name": job.submission_id, "submission": job.submission, "parts": job.elastic.max_nodes}
