"""Slurm's commands on this machine: run with a time limit, and told apart from an answer when there is none.

What is asked, and what an answer means, is in the other rooms of Slurm (render.py, states.py, errors.py); the
same commands on a login node that is reached through SSH are login.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tasks.common.errors import Missing
from tasks.common.redaction import without_secrets
from tasks.compute.job import Job
from tasks.config.cluster import ClusterConfig

ANSWER_SECONDS = 30.0
"""Slurm's own commands give up after 10 to 20 s (MessageTimeout, connect retries)."""
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

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS) -> Said: ...

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

    def run(self, words: Sequence[str], *, seconds: float = ANSWER_SECONDS) -> Said:
        if not shutil.which(words[0]):
            raise absent(words[0])
        try:
            ran = subprocess.run(
                words, env=_environment(), capture_output=True, text=True, timeout=seconds, check=False, cwd="/"
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


def open_login(config: ClusterConfig) -> Login:
    """Where Slurm's commands run: here, or on `slurm.login` through SSH. Raises Missing without the package for SSH."""
    if not config.slurm.login:
        return Here()
    from tasks.compute.slurm.login import There

    return There(config)


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


def _environment() -> dict[str, str]:
    """This process's environment, without secrets, which sbatch would hand to the job."""
    mine = without_secrets(os.environ, ())
    return {k: v for k, v in mine.items() if k in KEPT or not k.startswith(("SBATCH_", "SLURM_", "SQUEUE_", "SINFO_"))}
