"""A rank's view of its job: configuration in, metrics, progress and a result out.

The job folder is the whole contract with whoever launched the rank (tasks/compute/job.py writes its first half):
`config.json` in; `ranks/K.json`, `logs/rank-K.log`, `metrics.jsonl`, `errors/rank-K.json`, `result.json` out.
Nothing here knows of a backend, of Prefect or of MLflow. A program ends with `sys.exit(main(run))`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.errors import HeadwayError
from tasks.common.process import die_with_parent, process_started, write_json
from tasks.common.redaction import redact
from tasks.jobs.node.launching import interface_towards

MPI_PLACE = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
"""Open MPI's names for a rank's place."""


class Ended(HeadwayError):
    """A program ends for a reason whose class it knows itself, as tasks/compute/failures.json names them."""

    def __init__(self, message: str, *, failure: str, remedy: str = "", nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.failure = failure
        self.nodes = nodes
        """Machines that are the cause."""


@dataclass(frozen=True)
class Rank:
    """One process of a job. `settings` is what the stage put into the job; `inputs` maps names to verified folders."""

    folder: Path
    rank: int
    world_size: int
    attempt: int
    """1 for the first start of the job; every restart adds one."""
    settings: Mapping[str, Any]
    inputs: Mapping[str, Path]
    output: Path
    """Folder for the files that the stage will publish."""
    _clock: Callable[[], float] = field(default=time.time, repr=False)

    def metrics(self, **values: Any) -> None:
        """Append one record to `metrics.jsonl`; only rank 0 writes. One write of one line, so no reader sees half."""
        if self.rank == 0:
            line = json.dumps({**values, "attempt": self.attempt, "time": self._clock()}) + "\n"
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(line)

    def progress(self, done: float, total: float, text: str = "", *, seconds_left: float | None = None) -> None:
        """Say how far the job is; shown to people, never used for decisions. Without `seconds_left` it is estimated."""
        if self.rank == 0:
            output = {"done": done, "total": total, "text": text, "seconds_left": seconds_left}
            write_json(self.folder / "progress.json", output)


def open_rank() -> Rank:
    """Read the job folder named by `HEADWAY_JOB`, and the rank's place from the environment of torchrun or mpirun."""
    _take_place_of_mpi()
    folder = Path(os.environ["HEADWAY_JOB"])
    spec = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    output = folder / "out"
    output.mkdir(exist_ok=True)
    # The machine's agent may have copied some inputs to a disk of its own (scratch.py).
    copies: dict[str, str] = json.loads(os.environ.get("HEADWAY_INPUTS", "{}"))
    return Rank(
        folder=folder,
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        attempt=int(os.environ.get("HEADWAY_ATTEMPT", "1")),
        settings=spec["settings"],
        inputs={name: Path(path) for name, path in {**spec["inputs"], **copies}.items()},
        output=output,
    )


def _take_place_of_mpi() -> None:
    """Under mpirun, set what torchrun would have set; where ranks meet is in the environment already (mpi.py)."""
    if "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return
    for name, of_mpi in MPI_PLACE.items():
        os.environ[name] = os.environ[of_mpi]
    interface = interface_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def main(run: Callable[[Rank], dict[str, Any] | None]) -> int:
    """Run one rank: register it, redirect its output, report its error; rank 0 writes `result.json` last."""
    die_with_parent()
    rank = open_rank()
    register(rank)
    redirect(rank.folder / "logs" / f"rank-{rank.rank}.log")
    try:
        result = run(rank)
    except Exception as error:
        # Write what went wrong, classed: the launcher does not restart a user's error or a broken artifact.
        print(redact(traceback.format_exc()), file=sys.stderr)
        (rank.folder / "errors").mkdir(exist_ok=True)
        report = {
            "type": type(error).__name__,
            "message": redact(str(error)),
            "remedy": error.remedy if isinstance(error, HeadwayError) else "",
            "class": failure_class(error),
            "attempt": rank.attempt,
            **({"nodes": list(error.nodes)} if isinstance(error, Ended) else {}),
        }
        write_json(rank.folder / "errors" / f"rank-{rank.rank}.json", report)
        return 1
    if rank.rank == 0:
        write_json(rank.folder / "result.json", result or {})
    return 0


def register(rank: Rank) -> None:
    """Say which process a rank is."""
    (rank.folder / "ranks").mkdir(exist_ok=True)
    me = {"rank": rank.rank, "pid": os.getpid(), "started": process_started(os.getpid()), "host": socket.gethostname()}
    write_json(rank.folder / "ranks" / f"{rank.rank}.json", {**me, "attempt": rank.attempt})


def redirect(log: Path) -> None:
    """Send what this process prints to a log."""
    log.parent.mkdir(exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _no_memory(error: Exception) -> bool:
    """torch's allocator of the CPU raises a plain RuntimeError; a process that cannot be started, an OSError."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return allocator or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def failure_class(error: Exception) -> str:
    """Which of them are started again: tasks/common/process.py on the same machines, tasks/compute/failures.json anew.

    A loss that is not a number comes back at the same step of the same run, so starting again only costs.
    """
    if isinstance(error, FloatingPointError):
        return "diverged"
    if isinstance(error, Ended):
        return error.failure
    if isinstance(error, HeadwayError):
        return {5: "integrity", 6: "missing"}.get(error.exit_code, "infrastructure")
    if isinstance(error, ModuleNotFoundError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
        return "missing"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _no_memory(error):
        return "out_of_memory"
    return "user" if isinstance(error, ValueError) else "infrastructure"
