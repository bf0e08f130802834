"""A login node that is reached through SSH: Slurm's commands run there, and job folders lie in a folder that its nodes share.

A job folder is sent before its submission, its inputs once by their content; what changed comes back at every look, its
output at the end, and then it is deleted there. Checkpoints stay there until the job has a result. See
tasks/compute/connection.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tasks.common.errors import Missing
from tasks.common.process import read_json
from tasks.compute import connection as files
from tasks.compute.connection import Connection, Ran, Unreachable
from tasks.compute.job import WRITTEN_HERE, Job
from tasks.compute.slurm.commands import ANSWER_SECONDS, NoAnswer, Said, absent, answered
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig

LAST_END = (
    "attempt.json",
    "elements",
    "errors",
    "exit.json",
    "launcher.log",
    "logs",
    "nodes",
    "out",
    "ranks",
    "result.json",
)
"""What an earlier submission left there: it must not be read as the new one's."""


class There:
    """A login node. State: the open connection."""

    def __init__(self, config: ClusterConfig) -> None:
        if not config.slurm.shared:
            raise ValueError("slurm.login is set: set slurm.shared too, to a folder that login and compute nodes share")
        self._connection = Connection(config.slurm.login, config.slurm.ssh)
        self._root = PurePosixPath(config.slurm.shared)

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS) -> Said:
        output = self._answer(shlex.join(words), seconds)
        if output.code == 127:
            raise absent(words[0], self._where)
        return answered(words[0], Said(output.code, output.stdout.strip(), output.stderr.strip()))

    def seen(self, folder: Path) -> Path:
        return Path(self._root / "jobs" / folder.name)

    def seen_job(self, job: Job) -> Job:
        if not job.python and not job.image:
            raise ValueError(
                f"{self._where} runs the job: set cluster.python to a Python there that has Headway, or cluster.image"
            )
        inputs = {name: str(self._input(job, name)) for name in job.inputs}
        program = job.program if job.module else f"{self._root}/jobs/{job.id}/program/{Path(job.program).name}"
        return job.model_copy(update={"inputs": inputs, "program": program})

    def send(self, job: Job, folder: Path) -> None:
        remote = str(self.seen(folder))
        stale = shlex.join([f"{remote}/{name}" for name in LAST_END])
        made = self._answer(f"mkdir -p -m 700 {shlex.quote(remote)} && rm -rf -- {stale}")
        if made.code:
            raise Missing(
                f"{remote} on {self._where} cannot be written: {made.stderr.strip()}",
                remedy="Set slurm.shared to a folder of yours that login and compute nodes share.",
            )
        for name, path in job.inputs.items():
            files.push(self._connection, Path(path), str(self._input(job, name)))
        if not job.module:
            files.write(self._connection, f"{remote}/program/{Path(job.program).name}", Path(job.program).read_bytes())
        files.push(self._connection, folder, remote, skip=("supervisor.json", "supervisor.lock", "submissions"))

    def fetch(self, folder: Path, *, over: bool) -> None:
        remote = str(self.seen(folder))
        try:
            files.pull(
                self._connection, remote, folder, skip=(*WRITTEN_HERE, "checkpoints", *(() if over else ("out",)))
            )
        except Unreachable as error:
            raise NoAnswer(error.message, remedy=error.remedy) from None
        ended = read_json(folder / "nodes" / "0" / "exit.json") or {}
        if (
            over and ended.get("code") == 0 and read_json(folder / "result.json")
        ):  # else its checkpoints are still needed
            self._answer(f"rm -rf -- {shlex.quote(remote)}")

    @property
    def _where(self) -> str:
        return f"the login node {self._connection.address}"

    def _input(self, job: Job, name: str) -> PurePosixPath:
        """Where an input lies there: by its content where that has a version, else by its place here."""
        version = job.artifacts.get(name, job.inputs[name])
        return self._root / "inputs" / digest(version)[:32]

    def _answer(self, command: str, seconds: float = ANSWER_SECONDS) -> Ran:
        try:
            return self._connection.run(command, seconds=seconds)
        except Unreachable as error:
            raise NoAnswer(error.message, remedy=error.remedy) from None
