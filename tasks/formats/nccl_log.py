"""What NCCL, or RCCL, says of itself with NCCL_DEBUG=INFO: transports, networks, topology file, warnings, by machine. Pure.

NCCL picks what works, and says what it picked only here: a cluster whose InfiniBand is gone runs over TCP without an error.
The forms are those of NVIDIA/nccl @5067397 (src/debug.cc, src/transport/*.cc) and of releases back to 2.4. Rows of nccl-tests
that stand between these messages are nccl_tests.py's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MESSAGE = re.compile(
    r"(?:\[\d[^\]\n]{6,40}\] )?(?<![\w.])(?P<host>[A-Za-z0-9_][\w.-]{0,254}):(?P<pid>\d+):(?P<thread>\d+) \[(?P<device>-?\d+)\] "
    r"(?:\S+:\d+ (?:\([^)\n]*\) )?|[\d.]+ \S+:\d+ )?(?:NCCL )?(?P<level>INFO|WARN|TRACE|ABORT) (?P<text>[^\n]*)"
)
"""One message, wherever it stands in a line; host and level are always there."""
VERSION = re.compile(r"\b(N|R)CCL version *:? *(\d+\.\d+[\w.+-]*)")
_NETWORK = re.compile(r"via (?P<kind>NET|COLLNET)/(?P<name>[^/\n]+)/-?\d+(?:\(\d+\))?(?P<gdr>/GDRDMA)?")
_LOCAL = re.compile(r"via (?:(?P<p2p>P2P)/|(?P<shm>SHM/|direct shared memory))")
_NVLS = re.compile(r"Connected NVLS tree|NVLS comm ")
_USING = re.compile(r"Using network (.+)")
_TOPOLOGY = re.compile(r"Loading topology file (\S+)|NCCL_TOPO_FILE set by environment to (\S+)")
_RANK = re.compile(r"\brank (\d{1,9}) n[rR]anks (\d{1,9})\b")
_NO_TOPOLOGY = "Could not open XML topology file"
_NO_DEVICE = "NET/IB : No device found"


@dataclass(frozen=True)
class NcclLog:
    """What the messages of one text say. Machines by the names that they give themselves."""

    version: str = ""
    transports: tuple[str, ...] = ()
    """Really used, of all machines: NET/IB, NET/IB/GDRDMA, NET/Socket, P2P, SHM, NVLS, COLLNET/SHARP; sorted."""
    by_host: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The same of each machine that said something."""
    networks: tuple[tuple[str, str], ...] = ()
    """Machine and the network that it chose, such as IB or Socket, whether a channel went over it or not."""
    topologies: tuple[tuple[str, str], ...] = ()
    """Machine and the topology file that it read, or was told to."""
    without_topology: tuple[str, ...] = ()
    """Machines that could not open theirs."""
    without_device: tuple[str, ...] = ()
    """Machines where NCCL found no InfiniBand device."""
    ranks: tuple[tuple[int, str], ...] = ()
    """Rank and its machine."""
    world: int = 0
    """Ranks of the largest communicator."""
    warnings: tuple[tuple[str, str], ...] = ()
    """Machine and what it warned of, each once."""


def transports(text: str) -> tuple[str, ...]:
    """The transports that NCCL says it really used: NET/IB, NET/IB/GDRDMA, NET/Socket, P2P, SHM, NVLS, COLLNET/SHARP; sorted."""
    return read_log(text).transports


def messages(text: str) -> Iterator[re.Match[str]]:
    """Every message of NCCL in a text, in order."""
    for line in text.split("\n"):
        if "INFO " in line or "WARN " in line:
            yield from MESSAGE.finditer(line)


def transport_of(message: str) -> str:
    """The transport that a message tells of; empty when it tells of none. IBext, the plugin of Azure's images, is IB."""
    network = _NETWORK.search(message)
    if network:
        name = "IB" if network["name"].startswith("IB") else network["name"]
        return f"{network['kind']}/{name}{network['gdr'] or ''}"
    local = _LOCAL.search(message)
    if local:
        return "P2P" if local["p2p"] else "SHM"
    return "NVLS" if _NVLS.search(message) else ""


def read_log(text: str) -> NcclLog:
    """All that NCCL's messages in a text say; an empty value when there is none."""
    gathered = _Gathered()
    for message in messages(text):
        gathered.take(message["host"], message["level"], message["text"].rstrip())
    version = VERSION.search(text)
    return NcclLog(
        version=version[2] if version else "",
        transports=tuple(sorted({one for used in gathered.used.values() for one in used})),
        by_host=tuple((host, tuple(sorted(used))) for host, used in sorted(gathered.used.items())),
        networks=tuple(sorted(gathered.networks.items())),
        topologies=tuple(sorted(gathered.topologies.items())),
        without_topology=tuple(sorted(gathered.without_topology)),
        without_device=tuple(sorted(gathered.without_device)),
        ranks=tuple(sorted(gathered.ranks.items())),
        world=gathered.world,
        warnings=tuple(gathered.warnings),
    )


class _Gathered:
    """What was said so far."""

    def __init__(self) -> None:
        self.used: dict[str, set[str]] = {}
        self.networks: dict[str, str] = {}
        self.topologies: dict[str, str] = {}
        self.without_topology: set[str] = set()
        self.without_device: set[str] = set()
        self.ranks: dict[int, str] = {}
        self.world = 0
        self.warnings: dict[tuple[str, str], None] = {}

    def take(self, host: str, level: str, text: str) -> None:
        used = self.used.setdefault(host, set())
        if level == "WARN":
            self.warnings[host, text] = None
        elif transport := transport_of(text):
            used.add(transport)
        else:
            if network := _USING.match(text):
                self.networks[host] = network[1].strip()
            elif topology := _TOPOLOGY.search(text):
                self.topologies[host] = topology[1] or topology[2]
            elif _NO_TOPOLOGY in text:
                self.without_topology.add(host)
            elif _NO_DEVICE in text:
                self.without_device.add(host)
            elif rank := _RANK.search(text):
                self._rank(host, int(rank[1]), int(rank[2]))

    def _rank(self, host: str, rank: int, world: int) -> None:
        """Ranks of smaller communicators, those of a split, are no ranks of the run."""
        if world > self.world:
            self.ranks, self.world = {}, world
        if world == self.world:
            self.ranks[rank] = host
