"""What starts the ranks of a job on one machine, as values: the command and its environment.

torchrun, Open MPI (mpi.py), or, for a job of one rank, the program itself. What they need of the machine is here too:
a port, and a folder for compiled code. The machine's part is __main__.py.

What ranks may use of a machine (cores, memory, GPUs) is limited where no scheduler does that: of the backends local and ssh
(HEADWAY_LIMITS is set); Slurm, Azure ML and Ray have limits of their own. Memory is limited for each process (RLIMIT_DATA: what
it writes to and shares with nobody), at the job's memory divided by its ranks. So one rank cannot take what is another's; many
processes of one rank together can. See docs/machines.md.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.common.process import descendants, own_folder, read_json
from tasks.jobs.node.mpi import mpirun

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
    marks = {"HEADWAY_JOB": str(folder), "HEADWAY_NODE_RANK": str(node_rank)}.items()
    results = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone, or somebody else's
            if marks <= process.environ().items() and process.pid != os.getpid():
                process.kill()
                results.append(process.pid)
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
        message = f"the job asks for {asked} GPUs on a machine, {socket.gethostname()} has {len(existing)}"
        remedy = f"Set cluster.gpus_per_node to {len(existing)} or less."
        raise Refused(message, remedy, "user" if limited else "node")
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


def _simds(properties: Path) -> int:
    words = dict(line.split(" ", 1) for line in properties.read_text().splitlines() if " " in line)
    return int(words.get("simd_count", "0"))


QUIET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
ELASTIC = {
    "is_host": "0",
    "join_timeout": "604800",
    "last_call_timeout": "5",
    "close_timeout": "10",
    "keep_alive_interval": "3",
    "keep_alive_max_attempt": "3",
    "read_timeout": "60",
}
"""torch's rendezvous of an elastic job, in seconds. A machine that was lost is out after 3 beats of 3 s; then the others meet,
and wait 5 s for one more when they are fewer than the most. Who waits for the least number of machines waits a week, for
schedulers may take long. `is_host` 0: no machine holds the store, rendezvous.py does."""
ELASTIC_FAILURES = 1000
"""Failures of ranks on one machine that torchrun bears: each loss elsewhere is one. Who counts is rendezvous.py."""


@dataclass(frozen=True)
class Place:
    """A machine's place in an attempt."""

    node_rank: int
    address: str
    """Of node rank 0, as all machines reach it; of an elastic job, of the rendezvous store."""
    port: int
    attempt: int
    opening: int = 0
    """How often the rendezvous of an elastic job was opened."""


def program(job: dict[str, Any]) -> list[str]:
    """The job's program and its arguments, as Python takes them."""
    before = [] if job["module"] else ["tasks.jobs.node.user_program"]
    return ["-m", *before, job["program"], *job["arguments"]]


def launcher(job: dict[str, Any], place: Place) -> list[str]:
    """The command that starts this machine's ranks."""
    if int(job["nodes"]) * int(job["ranks_per_node"]) == 1 and not job["elastic"]:
        return [sys.executable, *program(job)]
    if job["launcher"] == "mpi":
        start = mpirun(job, address=place.address, port=place.port, machine=os.environ)
        return [*start, sys.executable, *program(job)]
    return [sys.executable, "-m", "torch.distributed.run", *_meeting(job, place), *program(job)]


def _meeting(job: dict[str, Any], place: Place) -> list[str]:
    per_node = ["--nproc-per-node", str(job["ranks_per_node"])]
    if job["elastic"]:
        return [*_elastic_meeting(job, place), *per_node]
    # A single machine, too: the store of `--standalone` is open to every address, and its agents load pickles from it.
    where = ["--master-addr", place.address, "--master-port", str(place.port)]
    who = ["--nnodes", str(job["nodes"]), "--node-rank", str(place.node_rank)]
    return [*who, *per_node, *where, "--rdzv-id", f"{job['token'][:12]}-{job['submission']}-{place.attempt}"]


def _elastic_meeting(job: dict[str, Any], place: Place) -> list[str]:
    """Membership is torch's; its own address is what a machine has on the way to the store, for names need not resolve."""
    least, most = job["elastic"]["min_nodes"], job["elastic"]["max_nodes"]
    settings = ",".join(f"{key}={value}" for key, value in ELASTIC.items())
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{place.address}:{place.port}", "--rdzv-conf", settings]
    mine = own_address_towards(place.address)
    local = ["--local-addr", mine] if mine else []
    who = ["--nnodes", f"{least}:{most}", "--rdzv-id", run_id(job, place.opening)]
    return [*who, *where, *local, "--max-restarts", str(ELASTIC_FAILURES)]


def run_id(job: dict[str, Any], opening: int) -> str:
    """Name of an elastic job's rendezvous; one that torch closed is closed for good, so the next opening has another name."""
    return f"{job['token'][:12]}-{job['submission']}-{opening}"


def environment(job: dict[str, Any], folder: Path, place: Place) -> dict[str, str]:
    """What the launcher gets beside the machine's own environment; the user's settings have the last word."""
    interface = interface_towards(place.address)
    gloo = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    ours = {
        "HEADWAY_JOB": str(folder),
        "HEADWAY_ATTEMPT": str(place.attempt),
        "OMP_NUM_THREADS": str(job["threads_per_rank"]),
        "PYTHONUNBUFFERED": "1",
    }
    elastic = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if job["elastic"] else {}
    return {**QUIET, **gloo, **ours, **elastic, **job["environment"]}


def forget_missing_topology(job: dict[str, Any]) -> list[str]:
    """Take NCCL's topology files that this machine does not have out of the environment, and say so, a line each.

    They are part of Azure's HPC images, and a container may have none. A file that the user's settings name stays.
    """
    lines = []
    for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"):
        file = os.environ.get(name, "")
        if file and name not in job["environment"] and not Path(file).is_file():
            del os.environ[name]
            lines.append(
                f"{name} is not set: {file} is not here, so NCCL finds the topology by itself, which may be slower"
            )
    return lines


def compile_cache(job: dict[str, Any]) -> dict[str, str]:
    """The folder of torch.compile's cache, as the ranks' environment; empty where the job or the machine names one.

    torch's own default has a known name in the shared temporary folder, and whoever makes it first has his libraries loaded.
    Raises Refused when somebody else has this one.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in {**os.environ, **job["environment"]}:
        return {}
    remedy = "name another folder in cluster.environment.TORCHINDUCTOR_CACHE_DIR"
    try:
        place = own_folder(Path(tempfile.gettempdir()) / f"headway-compile-{os.geteuid()}", remedy=remedy)
    except ValueError as error:
        raise Refused(str(error), f"Delete it, or {remedy}.", "node") from error
    return {"TORCHINDUCTOR_CACHE_DIR": str(place)}


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to connections (Linux: from 32768): the ranks' store is
    opened seconds later, and no connection takes it before."""
    for port in random.sample(range(15000, 32768), 200):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise OSError("no port from 15000 to 32767 is free: `ss -ltn` shows who has them")


def interface_towards(address: str) -> str:
    """The network interface that leads to an address; empty where none does or the system does not tell."""
    mine = own_address_towards(address)
    cards = psutil.net_if_addrs() if mine else {}
    return next((name for name, addresses in cards.items() if mine in [one.address for one in addresses]), "")


def own_address_towards(address: str) -> str:
    """This machine's own IPv4 address on the way to another one; empty where none leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
