"""What starts the ranks of a job on one machine, as values: the command and its environment.

torchrun, Open MPI, or, for a job of one rank, the program itself. The machine's part is node.py.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
SIOCGIFADDR = 0x8915
"""linux/sockios.h: the address of a network interface."""


@dataclass(frozen=True)
class Place:
    """A machine's place in an attempt."""

    node_rank: int
    address: str
    """Of node rank 0, as all machines reach it."""
    port: int
    attempt: int


def program(job: dict[str, Any]) -> list[str]:
    """The job's program and its arguments, as Python takes them."""
    return [*(["-m"] if job["module"] else []), job["program"], *job["arguments"]]


def launcher(job: dict[str, Any], place: Place) -> list[str]:
    """The command that starts this machine's ranks."""
    if int(job["nodes"]) * int(job["ranks_per_node"]) == 1 and not job["elastic"]:
        return [sys.executable, *program(job)]
    return [sys.executable, "-m", "torch.distributed.run", *_meeting(job, place), *program(job)]


def _meeting(job: dict[str, Any], place: Place) -> list[str]:
    per_node = ["--nproc-per-node", str(job["ranks_per_node"])]
    if int(job["nodes"]) == 1:
        return ["--standalone", *per_node]
    where = ["--master-addr", place.address, "--master-port", str(place.port)]
    who = ["--nnodes", str(job["nodes"]), "--node-rank", str(place.node_rank)]
    return [*who, *per_node, *where, "--rdzv-id", f"{job['token'][:12]}-{job['submission']}-{place.attempt}"]


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
    return {**QUIET, **gloo, **ours, **job["environment"]}


def interface_towards(address: str) -> str:
    """The network interface that leads to an address; empty where none does or the system does not tell."""
    if sys.platform == "darwin":
        return "lo0" if address == "127.0.0.1" else ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            mine = probe.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _address(probe, name) == mine), "")
        except OSError:
            return ""


def _address(probe: socket.socket, interface: str) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])
