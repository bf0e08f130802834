"""nccl-tests' or rccl-tests' own programs, where a machine has them: within the machine, one process with all its GPUs.

The ranks of the job were started by torchrun, so there is no launcher here that would start the programs on several machines;
between machines torch.distributed measures. Rank 0 of the machine runs the program, the others leave their GPUs alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.common.names import Collective
from tasks.formats.nccl_log import transports
from tasks.formats.nccl_run import TestRow
from tasks.formats.nccl_tests import read_nccl_tests
from tasks.qualification.measured import Row

PLACES = (
    "/opt/nccl-tests/build",
    "/opt/rccl-tests/build",
    "/usr/local/bin",
    "/opt/rocm/bin",
    "/usr/local/nccl-tests/build",
)
"""Where images have them beside PATH: Azure's HPC images build nccl-tests in /opt/nccl-tests."""
LAST_SECONDS = 5.0
"""For the last output of a program that was killed."""
OF_A_LAUNCHER = ("OMPI_", "PMI", "PMIX_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
"""A program that was built with MPI takes these for its place in a job of several processes, and waits for the others."""


@dataclass(frozen=True)
class Ran:
    """What a program came to."""

    tool: str = ""
    """With its version, as far as it says so."""
    rows: tuple[Row, ...] = ()
    transport: tuple[str, ...] = ()
    failed: str = ""
    """Why its rows are not to be trusted, or not all there."""


def binary(collective: Collective, search: str | None = None) -> Path | None:
    """The program of a collective; None where there is none."""
    path = search if search is not None else os.pathsep.join((os.environ.get("PATH", ""), *PLACES))
    result = shutil.which(f"{collective}_perf", path=path)
    return Path(result) if result else None


def run_binary(program: Path, sizes: Sequence[int], *, gpus: int, seconds: float) -> Ran:
    """Run it on all GPUs of this machine: from the smallest to the largest size by factor 2, every element checked."""
    command = [str(program), "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2", "-g", str(gpus), "-c", "1"]
    output, why = _said(command, seconds)
    print(output, flush=True)
    runs = read_nccl_tests(output, program.name)
    if not runs:
        return Ran(failed=why or "it printed no table")
    run = runs[-1]
    rows = tuple(_row(row) for row in run.rows)
    failed = why or "; ".join(run.failures) or ("" if rows else "it printed no rows")
    return Ran(f"{run.tool} {run.version}".strip(), rows, transports(output), failed)


def _said(command: list[str], seconds: float) -> tuple[str, str]:
    """What a command printed, and why it did not end well."""
    process = subprocess.Popen(
        command, env=alone(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            text, _ = process.communicate(timeout=LAST_SECONDS)
        except subprocess.TimeoutExpired:  # it hangs in the driver, or a child holds the pipe
            text = ""
        return text, f"timed out: {command[0]} took longer than {seconds:.0f} s"
    return text, "" if process.returncode == 0 else f"{command[0]} ended with exit code {process.returncode}"


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without a place in a job; NCCL tells its transports on the standard output, and uses no log of the rank."""
    kept = {name: value for name, value in environment.items() if not name.startswith(OF_A_LAUNCHER)}
    kept.pop("NCCL_DEBUG_FILE", None)
    return {**kept, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


def _row(row: TestRow) -> Row:
    return Row(
        bytes=row.bytes,
        microseconds=row.out.microseconds,
        algbw=row.out.algbw,
        busbw=row.out.busbw,
        wrong=row.out.wrong,
        microseconds_in_place=row.in_place.microseconds,
        algbw_in_place=row.in_place.algbw,
        busbw_in_place=row.in_place.busbw,
        wrong_in_place=row.in_place.wrong,
    )
