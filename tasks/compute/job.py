"""A job as data, and what a backend must do with it.

A job is one submission of a program of tasks/jobs. Its folder is the whole contract with the program (see
tasks/jobs/runtime.py for the rank's side). How a job is supervised lives in supervisor.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from tasks.process import write_json
from tasks.settings import digest


class Job(BaseModel):
    """What to run. Two jobs with one token are the same work; a different spec under one token is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The stage."""
    token: str
    """Derived from the stage's key."""
    program: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    """Verified folders by name."""
    nodes: int = 1
    ranks_per_node: int = 1
    threads_per_rank: int = 1
    restarts: int = 2
    """Restarts in a row without progress."""
    progress: str = ""
    """A file of the job folder whose content changes with progress."""
    time_limit: float | None = None
    """Seconds."""

    @property
    def spec_digest(self) -> str:
        return digest(self.model_dump(mode="json"))

    @property
    def id(self) -> str:
        return f"{self.name}-{self.token[:12]}"


class JobState(BaseModel):
    """What a backend knows of a job. `lost`: it was there, and is gone without a word."""

    model_config = ConfigDict(frozen=True)

    state: Literal["running", "ended", "lost"]
    code: int | None = None
    reason: str = ""
    attempts: int = 1


class JobResult(BaseModel):
    """A job that ended with a result."""

    model_config = ConfigDict(frozen=True)

    id: str
    folder: str
    submissions: int
    attempts: int
    adopted: bool
    resumed_from_step: int | None = None
    result: dict[str, Any]

    @property
    def output(self) -> Path:
        return Path(self.folder) / "out"

    def summary(self) -> dict[str, Any]:
        """What the command line prints of a job."""
        return self.model_dump(mode="json", exclude={"result"})


class Journal(Protocol):
    """Where intents and handles are kept, so that they outlive the orchestrator."""

    def put(self, key: str, value: dict[str, Any]) -> bool:
        """Create-only; False when the key exists."""
        ...

    def get(self, key: str) -> dict[str, Any] | None: ...

    def list(self, prefix: str) -> list[str]: ...


class Backend(Protocol):
    """Five methods. `submit` renders first; `find` looks for a job that was submitted under a token."""

    def submit(self, job: Job, folder: Path) -> dict[str, Any]: ...

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None: ...

    def state(self, handle: dict[str, Any], folder: Path) -> JobState: ...

    def cancel(self, handle: dict[str, Any], folder: Path) -> None: ...

    def logs(self, folder: Path) -> str:
        """The end of the failing rank's log, else of the launcher's."""
        ...


def write_folder(job: Job, folder: Path) -> None:
    """The launcher's half of the job folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {"program": job.program, "settings": job.settings, "inputs": job.inputs, "name": job.name},
    )
