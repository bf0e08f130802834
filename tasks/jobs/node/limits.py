"""What a job's ranks may use of a machine where no scheduler limits them: cores, memory, GPUs.

Of the backends local and ssh (HEADWAY_LIMITS is set); Slurm, Azure ML and Ray have limits of their own. Memory is limited for
each process (RLIMIT_DATA: what it writes to and shares with nobody), at the job's memory divided by its ranks. So one rank
cannot take what is another's; many processes of one rank together can. See docs/machines.md.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.common.process import descendants, read_json

# What an attempt leaves behind on a machine: processes that outlive what started them, and how they are ended.
#
# Programs that open a rank (runtime.py) die with their launcher. A user's own program need not, so the agent of the
# machine adopts what is orphaned, and looks for what an agent that was killed could not end. Linux; elsewhere this does
# nothing.


PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have the kernel give this process the orphans of its descendants (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all_below(pid: int) -> None:
    """Kill every process below one."""
    for below in descendants(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(below, signal.SIGKILL)


def end_leftovers(folder: Path, node_rank: int) -> list[int]:
    """Kill the processes of earlier attempts of a job on this machine; returns their ids.

    A process belongs to a job by the environment that its launcher gave it.
    """
    marks = {f"HEADWAY_JOB={folder}".encode(), f"HEADWAY_NODE_RANK={node_rank}".encode()}
    results = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = set((process / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if marks <= environment and int(process.name) != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(process.name), signal.SIGKILL)
                results.append(int(process.name))
    return results


GIB = 1024**3
NONE = ("", "-1", "NoDevFiles")
"""What says that there is no GPU: CUDA's words, and Slurm's."""
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""Where AMD's driver lists its processors; GPUs are those with SIMD units."""


class Refused(Exception):
    """The machine has not what the job asks for; `report` is what the job's errors say."""

    def __init__(self, message: str, remedy: str, failure: str) -> None:
        super().__init__(message)
        self.report = {"type": "ValueError", "message": message, "remedy": remedy, "class": failure}


def granted(job: dict[str, Any]) -> dict[str, str]:
    """The GPUs that ranks get, as their environment. Raises Refused when the machine has too few."""
    limited = bool(os.environ.get("HEADWAY_LIMITS"))
    asked = int(job["gpus_per_node"])
    existing = gpus() if asked or limited else ()
    if asked > len(existing):
        _refuse(asked, len(existing), user=limited)
    return visible(existing[:asked]) if limited else {}


def confine(job: dict[str, Any]) -> None:
    """Limit this process, and all that it starts, to the job's cores and memory."""
    if os.environ.get("HEADWAY_LIMITS"):
        cores = job["cpus_per_node"]
        may = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if cores and cores < len(may):
            os.sched_setaffinity(0, may[:cores])
        gib = job["memory_gib"]
        ranks = int(job["ranks_per_node"])
        if gib:
            most = int(gib * GIB / ranks)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as NVIDIA's and AMD's runtimes number them."""
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in os.environ:
            named = (part.strip() for part in os.environ[variable].split(","))
            return tuple(part for part in named if part not in NONE)
    nvidia = list(Path("/dev").glob("nvidia[0-9]*"))
    amd = [path for path in KFD.glob("*/properties") if _simds(path) > 0]
    return tuple(str(number) for number in range(len(nvidia) or len(amd)))


def visible(numbers: tuple[str, ...]) -> dict[str, str]:
    """The variable that hands GPUs to ranks: rank LOCAL_RANK of the machine computes on GPU number LOCAL_RANK of these."""
    variable = (
        "ROCR_VISIBLE_DEVICES" if "ROCR_VISIBLE_DEVICES" in os.environ or KFD.exists() else "CUDA_VISIBLE_DEVICES"
    )
    return {variable: ",".join(numbers)}


def out_of_memory(folder: Path, killed: dict[int, str]) -> dict[str, Any] | None:
    """What to report when ranks of this machine are among the processes that the kernel killed for their memory."""
    receipts = (read_json(path) or {} for path in (folder / "ranks").glob("*.json"))
    local = {int(rank["pid"]): int(rank["rank"]) for rank in receipts if rank.get("host") == socket.gethostname()}
    ranks = sorted(rank for pid, rank in local.items() if pid in killed)
    if not ranks:
        return None
    message = f"the kernel killed rank {', '.join(map(str, ranks))} on {socket.gethostname()}: memory was used up"
    return {"type": "OutOfMemory", "message": message, "remedy": "Use a smaller micro batch.", "class": "out_of_memory"}


def _refuse(asked: int, existing: int, *, user: bool) -> None:
    message = f"the job asks for {asked} GPUs on a machine, {socket.gethostname()} has {existing}"
    raise Refused(message, f"Set cluster.gpus_per_node to {existing} or less.", "user" if user else "node")


def _simds(properties: Path) -> int:
    words = dict(line.split(" ", 1) for line in properties.read_text().splitlines() if " " in line)
    return int(words.get("simd_count", "0"))
