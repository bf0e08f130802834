"""Slurm's commands, on this machine or on a login node: run with a time limit, and told apart from an answer when there is none.

What is asked, and what an answer means, is in the other files of Slurm (render.py, states.py). The
same commands on a login node that is reached through SSH stand below.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from tasks.common.errors import Missing
from tasks.common.process import read_json
from tasks.common.redaction import without_secrets
from tasks.compute import connection as files
from tasks.compute.connection import Connection, Ran, Unreachable
from tasks.compute.job import WRITTEN_HERE, Job
from tasks.compute.job_folder import FOLDER_KEY, SEEN, MirroredFolders
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig

ANSWER_SECONDS = 30.0
"""Slurm's own commands give up after 10 to 20 s (MessageTimeout, connect retries)."""


# A login node that is reached through SSH: Slurm's commands run there, and job folders lie in a folder that its nodes
# share.
#
# A job folder is sent before its submission, its inputs once by their content; what changed comes back at every look,
# its output at the end, and then it is deleted there. Checkpoints stay there until the job has a result. See
# tasks/compute/connection.py.


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
        if not config.slurm.shared and not config.mirror:
            raise ValueError("slurm.login is set: set slurm.shared too, to a folder that login and compute nodes share")
        self._connection = Connection(config.slurm.login, config.slurm.ssh)
        self._root = PurePosixPath(config.slurm.shared)

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS, stdin: str = "", key: str = "") -> Said:
        taken = f"read -r {FOLDER_KEY} && export {FOLDER_KEY} && " if key else ""
        command = shlex.join(("bash", "-c", f"{taken}exec {shlex.join(words)}")) if key else shlex.join(words)
        output = self._answer(command, seconds, f"{key}\n{stdin}" if key else stdin)
        if output.code == 127:
            raise absent(words[0], self._where)
        return answered(words[0], Said(output.code, output.stdout.strip(), output.stderr.strip()))

    def seen(self, folder: Path) -> Path:
        return Path(self._root / "jobs" / folder.name)

    def seen_job(self, job: Job) -> Job:
        self.require_python(job)
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

    def require_python(self, job: Job) -> None:
        if not job.python and not job.image:
            raise ValueError(
                f"{self._where} runs the job: set cluster.python to a Python there that has Headway, or cluster.image"
            )

    @property
    def _where(self) -> str:
        return f"the login node {self._connection.address}"

    def _input(self, job: Job, name: str) -> PurePosixPath:
        """Where an input lies there: by its content where that has a version, else by its place here."""
        version = job.artifacts.get(name, job.inputs[name])
        return self._root / "inputs" / digest(version)[:32]

    def _answer(self, command: str, seconds: float = ANSWER_SECONDS, stdin: str = "") -> Ran:
        try:
            return self._connection.run(command, stdin=stdin, seconds=seconds)
        except Unreachable as error:
            raise NoAnswer(error.message, remedy=error.remedy) from None


KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""Of the variables that steer Slurm's commands: where the cluster is. Others would change what was rendered."""
SILENCE = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
    "connection refused",
    "temporarily unable to accept job",
    "slurm_persist_conn",
    "could not establish a configuration source",
    "munge encode failed",
    "protocol authentication error",
)
"""What a command says when the scheduler did not answer; a submission may have arrived all the same."""


class NoAnswer(Missing):
    """The scheduler gives no answer now; it may a moment later."""


@dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return "\n".join(part for part in (self.out, self.err) if part)


class Login(Protocol):
    """A login node. Every command raises NoAnswer when nothing is said in time, Missing when it is not there."""

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS, stdin: str = "", key: str = "") -> Said:
        """Run a command; a `key` of a job's folder is in its environment, and in no command line."""
        ...

    def seen(self, folder: Path) -> Path:
        """A job folder of this machine as the nodes see it."""
        ...

    def seen_job(self, job: Job) -> Job:
        """A job with its inputs where the nodes see them."""
        ...

    def send(self, job: Job, folder: Path) -> None:
        """Bring a job folder, and the job's inputs, to where the nodes see them."""
        ...

    def fetch(self, folder: Path, *, over: bool) -> None:
        """Bring what changed in a job folder; its output when the job is over."""
        ...


class Here:
    """This machine is a login node, and Headway's home is shared with the compute nodes."""

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS, stdin: str = "", key: str = "") -> Said:
        if not shutil.which(words[0]):
            raise absent(words[0])
        try:
            # This process's environment, without secrets, which sbatch would hand to the job
            mine = without_secrets(os.environ, ())
            environment = {
                k: v
                for k, v in mine.items()
                if k in KEPT or not k.startswith(("SBATCH_", "SLURM_", "SQUEUE_", "SINFO_"))
            }
            ran = subprocess.run(
                words,
                env={**environment, **({FOLDER_KEY: key} if key else {})},
                input=stdin,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise silent(f"{words[0]} gave no answer within {seconds:g} s") from None
        return answered(words[0], Said(ran.returncode, ran.stdout.strip(), ran.stderr.strip()))

    def seen(self, folder: Path) -> Path:
        return folder

    def seen_job(self, job: Job) -> Job:
        return job

    def send(self, job: Job, folder: Path) -> None:
        """Nothing is to be brought: the folder is shared."""

    def fetch(self, folder: Path, *, over: bool) -> None:
        """Nothing is to be brought: the folder is shared."""


class Apart:
    """Nodes that share no folder with anybody: the job's folder lies in a store. Slurm's commands run as they do without."""

    def __init__(self, login: Here | There, mirrored: MirroredFolders) -> None:
        self._login, self._mirrored = login, mirrored

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS, stdin: str = "", key: str = "") -> Said:
        return self._login.run(words, seconds=seconds, stdin=stdin, key=key)

    def seen(self, folder: Path) -> Path:
        return SEEN

    def seen_job(self, job: Job) -> Job:
        if isinstance(self._login, There):
            self._login.require_python(job)
        return job

    def send(self, job: Job, folder: Path) -> None:
        self._mirrored.send(job, folder)

    def fetch(self, folder: Path, *, over: bool) -> None:
        """Without the output, which comes when the state of a job that is over is told. Raises IntegrityError."""
        try:
            self._mirrored.bring(folder)
        except Missing as error:
            raise NoAnswer(error.message, remedy=error.remedy) from None


def open_login(config: ClusterConfig) -> Here | There:
    """Where Slurm's commands run: here, or on `slurm.login` through SSH. Raises Missing without the package for SSH."""
    return There(config) if config.slurm.login else Here()


def answered(command: str, output: Said) -> Said:
    """The answer, unless it says that the scheduler gave none."""
    if output.code and any(sign in output.text.lower() for sign in SILENCE):
        raise silent(f"{command}: {output.err or output.out}")
    return output


def silent(what: str) -> NoAnswer:
    """The error for a scheduler that does not answer."""
    remedy = "Headway waits and asks again; `scontrol ping` on the login node says whether slurmctld runs."
    return NoAnswer(f"the Slurm scheduler does not answer: {what}", remedy=remedy)


def absent(command: str, where: str = "this machine") -> Missing:
    """The error for a machine without Slurm's commands."""
    return Missing(
        f"{where} has no {command}",
        remedy=(
            "Run Headway on a login node of the Slurm cluster, or set cluster.slurm.login to one; on Debian and Ubuntu the "
            "commands are in the package slurm-client, on CycleCloud's nodes in /opt/slurm/bin or /usr/bin."
        ),
    )
