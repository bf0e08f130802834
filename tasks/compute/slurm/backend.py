"""The Slurm backend: sbatch over a job folder that login and compute nodes share. The walk of five files ends here.

With `cluster.mirror` they share none: the folder lies in a store (../job_folder.py), and each node's task is a mirror of it.
What is submitted is render.py, what Slurm's answers and refusals mean is states.py. The commands run on this
machine or on a login node through SSH (commands.py). Who calls the backend, from submission to submission, is
tasks/compute/supervisor.py. As shipped, Slurm itself starts a job again whose node failed (`slurm.requeue`): then there is no
further submission. Which faults end how: docs/slurm.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import OpenFiles
from tasks.common.errors import JobFailed, Missing
from tasks.common.process import read_json, write_json, write_text
from tasks.compute.job import Job, JobState, Rendered, before_submission
from tasks.compute.job_folder import MirroredFolders, key_of
from tasks.compute.nodes import write_nodes
from tasks.compute.slurm import render as slurm_render
from tasks.compute.slurm import states
from tasks.compute.slurm.commands import Apart, Login, NoAnswer, Said, open_login, silent
from tasks.compute.slurm.elastic import SlurmElastic
from tasks.compute.slurm.states import Row
from tasks.config.cluster import ClusterConfig

SUBMISSIONS = 3
"""How often a submission is sent when its answer is lost and no job is found; the batch script lets only one of them run."""
CANCEL_SECONDS = 8.0
"""Patience with scancel: a cancelled flow run ends within 15 s, and scancel is repeated."""


SACCT = (
    *("sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now-30days"),
    f"--format={','.join(states.SACCT)}",
)


class SlurmBackend:
    """A Slurm cluster. State: whether it keeps accounts, once that is known."""

    poll_seconds = 5.0

    def __init__(self, config: ClusterConfig, files: OpenFiles | None = None) -> None:
        """`files` gives the container of a store by its name, where `cluster.mirror` names one. Raises ValueError."""
        self._config = config.slurm
        self._mirrored = MirroredFolders(config.mirror, files(config.mirror.store)) if config.mirror and files else None
        login = open_login(config)
        self._login: Login = Apart(login, self._mirrored) if self._mirrored else login
        self._accounts = True
        self._elastic = SlurmElastic(self._config, self._login, _squeue)

    def render(self, job: Job, folder: Path) -> Rendered:
        if job.elastic:
            return self._elastic.render(job, folder)
        remote, mine = self._login.seen(folder), self._login.seen_job(job)
        if self._mirrored:  # nobody else sees the script: sbatch reads it from its standard input
            text = slurm_render.mirrored_script(mine, self._config, folder, self._mirrored)
            return Rendered(backend="slurm", command=("sbatch", "--parsable"), files={slurm_render.SCRIPT: text})
        text = slurm_render.script(mine, self._config, remote)
        command = ("sbatch", "--parsable", f"{remote}/{slurm_render.SCRIPT}")
        return Rendered(backend="slurm", command=command, files={slurm_render.SCRIPT: text})

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        if job.elastic:
            return self._elastic.submit(job, folder)
        with before_submission():
            partitions = self._login.run(states.PARTITIONS)
            states.require_limits(job, self._config, states.parse_partitions(partitions.out))
            states.require_image(job, self._login)
            rendered = self.render(states.restricted(job, self._config, self._login), folder)
            remote = self._login.seen(folder)
            mine = self._login.seen_job(job)
            write_nodes(mine, folder, seen=remote)
            for element in range(job.array):
                place = f"elements/{element}"
                write_nodes(mine, folder / place, seen=remote / place)
            for name, text in rendered.files.items():
                write_text(folder / name, text)
            self._login.send(job, folder)
        stdin, key = (rendered.files[slurm_render.SCRIPT], key_of(folder).decode()) if self._mirrored else ("", "")
        for _ in range(SUBMISSIONS):
            try:
                output = self._login.run(rendered.command, stdin=stdin, key=key)
            except NoAnswer:
                result = self.find(job, folder)  # raises NoAnswer while there is none: the job may be there
                if result:
                    return result
                continue
            if output.code:
                raise states.refusal(output, job, self._config, self._login)
            return _handle(job, output.out.splitlines()[-1])
        raise silent("it took no submission")

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        if job.elastic:
            return self._elastic.find(job, folder)
        output = self._login.run(_squeue("--me", f"--name={job.submission_id}"))
        if output.code:
            raise silent(output.text)
        rows = [*states.parse_squeue(output.out), *self._account([f"--name={job.submission_id}"])]
        ids = [int(row.job) for row in rows if row.name == job.submission_id and not row.refused]
        if ids:
            return _handle(job, str(min(ids)))
        self._login.fetch(folder, over=False)
        mark = read_json(folder / f"slurm-{job.submission}.json")
        return _handle(job, mark["job"]) if mark and mark["name"] == job.submission_id else None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        elastic = [job for job in jobs if "parts" in job[0]]
        whole = iter(self._whole_states([job for job in jobs if "parts" not in job[0]]))
        parted = iter(self._elastic.states(elastic) if elastic else [])
        return [next(parted if "parts" in handle else whole) for handle, _ in jobs]

    def _whole_states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        if not jobs:
            return []
        try:
            ids = [_job_of(handle, folder) for handle, folder in jobs]
            rows: dict[str, list[Row]] = {}
            for row in self._rows(ids):
                rows.setdefault(row.job, []).append(row)
            return [
                self._state(handle, folder, rows.get(id, [])) for id, (handle, folder) in zip(ids, jobs, strict=True)
            ]
        except NoAnswer as error:
            return [JobState(state="unknown", reason=error.message) for _ in jobs]

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        if "parts" in handle:
            self._elastic.cancel(handle, folder)
            return
        # by its name: a submission whose answer was lost may be there twice
        output = self._login.run(("scancel", f"--name={handle['name']}"), seconds=CANCEL_SECONDS)
        if output.code:
            raise JobFailed(f"scancel: {output.text}", failure="infrastructure", folder=str(folder))

    def _rows(self, ids: Sequence[str]) -> list[Row]:
        """What Slurm knows of some jobs, by one call; where it keeps accounts, a second one for those that it forgot."""
        output = self._login.run(_squeue(f"--jobs={','.join(ids)}"))
        if output.code and "invalid job id" not in output.text.lower():
            raise silent(output.text)
        rows = states.parse_squeue(output.out) if not output.code else []
        known = {row.job for row in rows if row.state != "CANCELLED"}
        asked = [id for id in ids if id not in known]
        try:
            accounted = self._account([f"--jobs={','.join(asked)}"]) if asked else []
        except NoAnswer:
            silent_on = set(asked) - {row.job for row in rows}
            accounted = [states.unanswered(id) for id in asked if id in silent_on]
        better = {row.id for row in accounted}
        return [*accounted, *(row for row in rows if row.id not in better)]

    def _account(self, which: list[str]) -> list[Row]:
        """The same from accounting; nothing where the cluster keeps none."""
        if not self._accounts:
            return []
        try:
            output = self._login.run((*SACCT, *which))
        except NoAnswer:
            raise
        except Missing:
            output = Said(127, "", "it is disabled: there is no sacct")
        if output.code and "is disabled" not in output.text:
            raise silent(f"sacct: {output.text}")
        self._accounts = output.code == 0
        return states.parse_sacct(output.out) if self._accounts else []

    def _state(self, handle: dict[str, Any], folder: Path, mine: list[Row]) -> JobState:
        array = int(handle.get("array", 0))
        queued = bool(mine) and all(row.state in states.QUEUED for row in mine)

        def look() -> JobState:
            return states.state_of(mine, folder, array=array)

        if queued:
            return look()
        if self._mirrored:
            state = self._mirrored.state(folder, look)
        else:
            self._login.fetch(folder, over=False)
            state = look()
            if state.over:
                self._login.fetch(folder, over=True)
        if not state.over:
            return state
        if array and state.code == 0:
            # The result of an array is those of its elements; without one of them there is none.
            results = [read_json(folder / "elements" / str(k) / "result.json") for k in range(array)]
            made = [result or any((folder / "elements" / str(k) / "out").glob("*")) for k, result in enumerate(results)]
            if all(made):
                write_json(folder / "result.json", {"elements": results})
        if state.failure != "node":
            return state
        # Name the nodes that failed: those of the job that are not in order, else those that srun told.
        names = ",".join(row.nodes for row in mine if row.nodes)
        output = self._login.run((*states.SINFO, f"--nodes={names}")).out if names else ""
        bad = states.bad_nodes(output)
        return state.model_copy(update={"failed_nodes": bad or states.nodes_in_log(folder)})


def _squeue(*which: str) -> tuple[str, ...]:
    columns = ",".join(f"{name}:|" for name in states.SQUEUE)
    return ("squeue", "--noheader", "--states=all", "--array", f"--Format={columns}", *which)


def _handle(job: Job, text: str) -> dict[str, Any]:
    """The handle of a submitted job. sbatch answers with its id, on a federation with the cluster's name behind it."""
    number, _, cluster = text.strip().partition(";")
    if not number.isdigit():
        raise JobFailed(
            f"sbatch answered {shlex.quote(text)}, which is no job's id", failure="infrastructure", folder=""
        )
    more = {"cluster": cluster} if cluster else {}
    return {"job": number, "name": job.submission_id, "submission": job.submission, "array": job.array, **more}


def _job_of(handle: dict[str, Any], folder: Path) -> str:
    """The job that runs a submission: the one that claimed the folder, where there may be two."""
    claim = read_json(folder / f"slurm-{handle['submission']}.json") or {}
    return str(claim["job"] if claim.get("name") == handle["name"] else handle["job"])
