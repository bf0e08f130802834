"""Open MPI as the launcher of a job: mpirun on the machine of node rank 0 starts the ranks of all machines.

How it reaches the others is the scheduler's: inside a Slurm job through srun; else by ssh, to the machines that the backend names
in HEADWAY_MPI_HOSTS, with the agent of OMPI_MCA_plm_rsh_agent. Ranks meet as torchrun's do (runtime.py). See docs/launchers.md.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.process import write_json

ALWAYS = ("HEADWAY_JOB", "HEADWAY_ATTEMPT", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
EXPORTED = ("HEADWAY_SUBMISSION", "HEADWAY_TOKEN", "PYTHONPATH", "PYTHONSAFEPATH")
"""Variables that ranks on other machines get too, beside the job's own: what launching.py sets, and what the backend may have."""
NETWORK = ("NCCL_", "RCCL_", "UCX_", "SHARP_")
"""How the names of the network's variables begin, which they get too."""


def mpirun(job: dict[str, Any], *, address: str, port: int, machine: Mapping[str, str]) -> list[str]:
    """The command that starts all ranks; they meet at the address of node rank 0. `machine` is the environment there."""
    hosts = machine.get("HEADWAY_MPI_HOSTS", "")
    each, nodes = int(job["ranks_per_node"]), int(job["nodes"])
    if hosts:
        where = ["--host", ",".join(f"{host}:{each}" for host in hosts.split(","))]
    elif nodes > 1:  # Slurm's: the step in which mpirun runs holds all CPUs, so its own step must overlap it
        where = ["--mca", "plm_slurm_args", "--overlap"]
    else:
        where = ["--mca", "plm", "isolated", "--mca", "ras", "^slurm"]
    how = ["-np", str(nodes * each), "--map-by", f"ppr:{each}:node:oversubscribe", "--bind-to", "none"]
    meeting = ["-x", f"MASTER_ADDR={address}", "-x", f"MASTER_PORT={port}"]
    # The options that carry variables to the other machines; values stay out of the command line.
    names = {*ALWAYS, *job["environment"], *(name for name in machine if name in EXPORTED or name.startswith(NETWORK))}
    return [
        sys.executable,
        "-m",
        "tasks.jobs.node.mpi",
        "mpirun",
        *where,
        *how,
        *meeting,
        *[word for name in sorted(names) for word in ("-x", name)],
    ]


def main(command: list[str]) -> int:
    """Become mpirun. Without one the job's errors say so, as a failure that does not go away by starting again."""
    user = os.geteuid()
    if not os.environ.get("HOME") and not _known(user):  # Open MPI would crash
        return _missing(
            f"knows no user {user}, so that Open MPI finds no home",
            "Set HOME in the image, as docker/cluster.Dockerfile does, or cluster.launcher to torchrun.",
        )
    as_root = ["--allow-run-as-root"] if user == 0 else []
    try:
        os.execvp(command[0], [command[0], *as_root, *command[1:]])
    except FileNotFoundError:
        return _missing(
            f"has no {command[0]}, and the job's launcher is mpi",
            "Install Open MPI there (Debian: openmpi-bin), or set cluster.launcher to torchrun.",
        )


def _known(user: int) -> bool:
    try:
        return bool(pwd.getpwuid(user))
    except KeyError:
        return False


def _missing(what: str, remedy: str) -> int:
    """Say in the job's errors what this machine lacks; the exit code."""
    name = os.environ.get("HEADWAY_NODE_NAME", "")
    report = {
        "type": "Missing",
        "message": f"machine {name} {what}".replace("  ", " "),
        "remedy": remedy,
        "class": "missing",
        "attempt": int(os.environ.get("HEADWAY_ATTEMPT", "1")),
        "nodes": [],
    }
    write_json(Path(os.environ["HEADWAY_JOB"]) / "errors" / f"node-{name or 'leader'}.json", report)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
