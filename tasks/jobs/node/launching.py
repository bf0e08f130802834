"""What starts the ranks of a job on one machine, as values: the command and its environment.

torchrun, Open MPI (mpi.py), or, for a job of one rank, the program itself. What they need of the machine is here too:
a port, and a folder for compiled code. The machine's part is __main__.py.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.process import own_folder
from tasks.jobs.node.limits import Refused
from tasks.jobs.node.mpi import mpirun

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
SIOCGIFADDR = 0x8915
"""linux/sockios.h: the address of a network interface."""


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
    if sys.platform == "darwin":
        return "lo0" if address == "127.0.0.1" else ""
    mine = own_address_towards(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return next((name for _, name in socket.if_nameindex() if mine and _address(probe, name) == mine), "")


def own_address_towards(address: str) -> str:
    """This machine's own IPv4 address on the way to another one; empty where none leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def _address(probe: socket.socket, interface: str) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
