"""One run of nccl-tests or rccl-tests, as a value: what both its text (nccl_tests.py) and its JSON are read into.

Pure. What is good or bad about the figures is tasks/qualification/from_logs.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from tasks.common.redaction import MARK, redact, without_secrets

# The JSON that nccl-tests write with -J: the same run as its text has, and the machine's environment without its
# secrets.
#
# Pure. The form is NVIDIA/nccl-tests @a0b82b2, src/util.cu, JSON_FILE_VERSION 3. Booleans and not-a-number are strings
# there, a run that was killed leaves the object open. Nothing is raised: what is missing or of another form is said in
# `unread`.


_INFINITE = re.compile(r"(?<=[:\[,])\s*-?(?:inf|nan)(?=[,}\]])")


def read_nccl_json(text: str, name: str = "") -> NcclRun | None:
    """The run of a file of -J; None when it is none. What a killed run left open is closed."""
    text, problems = _INFINITE.sub('"nan"', text.strip()), list[str]()
    try:
        output = json.loads(text)
    except (ValueError, RecursionError):
        output, problems = _closed(text), ["the file ends in the middle: the run did not finish"]
    if not isinstance(output, dict) or not {"results", "config", "nccl_version"} & set(output):
        return None
    config, results = _dict(output.get("config")), _list(output.get("results"))
    rows = [_row(_dict(result)) for result in results]
    unread = [*problems, *(f"result {n} has no size" for n, row in enumerate(rows) if row is None)]
    args = _list(output.get("args"))
    collective = (collective_of(str(args[0])) if args else "") or collective_of(name)
    run = NcclRun(
        tool="nccl-tests",
        library=_version(output.get("nccl_version")),
        collective=collective,
        ranks=tuple(_rank(_dict(device)) for device in _list(config.get("devices"))),
        rows=tuple(row for row in rows if row),
        header="results" in output,
        out_of_bounds=_integer(_dict(output.get("out_of_bounds")).get("count")),
        average_printed=finite(_dict(output.get("average_bus_bandwidth")).get("bandwidth")),
        average_accepted={"true": True, "false": False}.get(
            str(_dict(output.get("average_bus_bandwidth")).get("okay")).lower()
        ),
        validated=None if "validation" not in config else bool(_integer(config.get("validation"))),
        failures=tuple(redact(str(error))[:300] for error in _list(output.get("errors")) if error),
        unread=tuple(unread),
        environment=environment_of(_list(output.get("env"))),
    )
    return replace(run, collective=run.collective or collective_by_figures(run))


def environment_of(entries: list[Any]) -> dict[str, str]:
    """NAME=VALUE as a dict; a value that is a secret, by its name or its form, is a mark."""
    split = (str(entry).partition("=") for entry in entries)
    output = {name: value for name, _, value in split}
    safe = without_secrets(output)
    return {name: redact(value) if name in safe else MARK for name, value in output.items()}


def _closed(text: str) -> Any:
    """The longest beginning that is a value once its brackets are closed; None when there is none."""
    open_brackets, ends = "", []
    quoted = escaped = False
    for place, sign in enumerate(text):
        if quoted:
            quoted, escaped = escaped or sign != '"', sign == "\\" and not escaped
        elif sign == '"':
            quoted = True
        elif sign in "{[":
            open_brackets += "}" if sign == "{" else "]"
        elif sign in "}]":
            if not open_brackets.endswith(sign):
                return None
            open_brackets = open_brackets[:-1]
            ends.append((place + 1, open_brackets))
    for place, still in reversed(ends[-4:]):
        try:
            return json.loads(text[:place] + still[::-1])
        except (ValueError, RecursionError):
            continue
    return None


def _rank(device: dict[str, Any]) -> Rank:
    return Rank(
        _integer(device.get("rank")) or 0,
        str(device.get("hostname") or ""),
        _integer(device.get("group")) or 0,
        _integer(device.get("device")) or 0,
        str(device.get("device_info") or ""),
    )


def _row(result: dict[str, Any]) -> TestRow | None:
    size = _integer(result.get("size"))
    if size is None:
        return None
    return TestRow(
        bytes=size,
        type=str(result.get("type") or ""),
        redop=str(result.get("redop") or ""),
        root=_integer(result.get("root")),
        out=_figures(_dict(result.get("out_of_place"))),
        in_place=_figures(_dict(result.get("in_place"))),
    )


def _figures(output: dict[str, Any]) -> Figures:
    time = output.get("time", output.get("cpu_time"))
    time, algbw, busbw = (
        None if value is None or value < 0 else value
        for value in (finite(time), finite(output.get("alg_bw")), finite(output.get("bus_bw")))
    )
    return Figures(time, algbw, busbw, _integer(output.get("nwrong")))


def _version(code: Any) -> str:
    """23003 is 2.30.3; before 2.9 it was four digits: 2804 is 2.8.4."""
    number = _integer(code)
    if not number:
        return ""
    major, minor, patch = (
        (number // 10000, number // 100 % 100, number % 100)
        if number >= 10000
        else (number // 1000, number // 100 % 10, number % 100)
    )
    return f"{major}.{minor}.{patch}"


def _integer(value: Any) -> int | None:
    number = finite(value)
    return None if number is None else int(number)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


FACTORS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "alltoall": 1,
    "gather": 1,
    "scatter": 1,
    "broadcast": 0,
    "reduce": 0,
    "sendrecv": 0,
}
"""Bus bandwidth is algorithm bandwidth times k(n-1)/n over n ranks, and times 1 where k is 0: nccl-tests doc/PERFORMANCE.md."""
PROGRAM = re.compile(
    r"(?<![a-z])(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send_?recv|reduce|gather|scatter)(?![a-z])"
)
PRECISE = 256
"""Ranks up to which two figures of two decimals tell their number."""
_PLAIN = {name.replace("_", ""): name for name in FACTORS}


@dataclass(frozen=True)
class Rank:
    """A line of the list of devices."""

    rank: int
    host: str
    group: int = 0
    device: int = 0
    name: str = ""
    """Of the GPU; some versions leave it out."""


@dataclass(frozen=True)
class Figures:
    """What was measured of one size, out of place or in place. Bandwidths in GB/s; None where no number stands."""

    microseconds: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None
    """Elements with a wrong value. Versions with a column `error` count none: 0 within the tolerance, 1 with an asterisk."""


@dataclass(frozen=True)
class TestRow:
    """One size."""

    bytes: int
    type: str = ""
    redop: str = ""
    root: int | None = None
    out: Figures = Figures()
    in_place: Figures = Figures()


@dataclass(frozen=True)
class NcclRun:
    """One run, as far as the log goes."""

    tool: str
    """nccl-tests or rccl-tests."""
    version: str = ""
    library: str = ""
    """NCCL's version, or RCCL's."""
    collective: str = ""
    """Of FACTORS; empty when neither the log nor its name nor the figures say."""
    ranks: tuple[Rank, ...] = ()
    rows: tuple[TestRow, ...] = ()
    header: bool = False
    """Whether the columns were named: from there on rows were to come."""
    out_of_bounds: int | None = None
    average_printed: float | None = None
    average_accepted: bool | None = None
    """Where NCCL_TESTS_MIN_BW was set: whether the average reached nine tenths of it."""
    validated: bool | None = None
    reduced_to: int | None = None
    """Largest message, where memory did not do for the one that was asked for."""
    processes: int = 1
    """Processes that each wrote a run of its own; more than 1: built without MPI."""
    failures: tuple[str, ...] = ()
    """Lines that tell of a failure."""
    unread: tuple[str, ...] = ()
    """Lines that should be rows and are none, and values that are no numbers, with their line numbers."""
    lines: tuple[int, int] = (0, 0)
    """First and last."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of a run's JSON, without secrets."""

    @property
    def group(self) -> tuple[Rank, ...]:
        """The ranks that communicated with rank 0: with NCCL_TESTS_SPLIT only those of its group."""
        first = min(self.ranks, key=lambda rank: rank.rank, default=None)
        return tuple(rank for rank in self.ranks if first and rank.group == first.group)

    @property
    def groups(self) -> int:
        return len({rank.group for rank in self.ranks})

    @property
    def hosts(self) -> tuple[str, ...]:
        """Machines of all groups, in the order of their ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def world(self) -> int | None:
        """Ranks of one communicator: those listed, or as many as the figures have where the list is cut (at 2048 characters)."""
        listed, by_figures = len({rank.rank for rank in self.group}), self.world_by_figures or 0
        return (by_figures if 1.1 * listed < by_figures <= PRECISE else listed) or None

    @property
    def world_by_figures(self) -> int | None:
        """Ranks by the ratio of bus bandwidth to algorithm bandwidth of the most precise row; None when it says nothing."""
        ratio, k = self.ratio, FACTORS.get(self.collective, 0)
        if ratio is None or not k / 2 * 0.99 < ratio < k or self._largest[0] < 1:
            return None
        return round(k / (k - ratio))

    @property
    def ratio(self) -> float | None:
        """Bus bandwidth by algorithm bandwidth, of the row with the largest."""
        algbw, busbw = self._largest
        return busbw / algbw if algbw else None

    @property
    def _largest(self) -> tuple[float, float]:
        """Algorithm and bus bandwidth of the row with the most digits."""
        pairs = [
            (figures.algbw, figures.busbw)
            for row in self.rows
            for figures in (row.out, row.in_place)
            if figures.algbw and figures.busbw is not None
        ]
        return max(pairs, default=(0.0, 0.0))

    @property
    def average(self) -> float | None:
        """Mean of the bus bandwidth over all rows, out of place and in place, as nccl-tests take it."""
        messages = [
            figures.busbw for row in self.rows for figures in (row.out, row.in_place) if figures.busbw is not None
        ]
        return sum(messages) / len(messages) if messages else None

    @property
    def averages_agree(self) -> bool:
        """Whether the printed average is that of the rows, but for rounding; True when there are not both."""
        if self.average_printed is None or self.average is None:
            return True
        coarse = max((figure.busbw or 0.0 for row in self.rows for figure in (row.out, row.in_place)), default=0.0)
        rounding = 0.006 if coarse < 1000 else 0.06
        return abs(self.average_printed - self.average) <= rounding + 1e-4 * abs(self.average)


def finite(value: Any) -> float | None:
    """A number, or a text of one; None for all else, not-a-number and infinity too."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def collective_of(text: str) -> str:
    """The collective that a program, a command or a file is named after; empty when none is."""
    match = PROGRAM.search(
        PurePath(text).name.lower().replace("-", "_") if "/" in text and " " not in text else text.lower()
    )
    return _PLAIN.get(match[1].replace("_", ""), "") if match else ""


def collective_by_figures(run: NcclRun) -> str:
    """The collective whose bus bandwidth has the rows' factor; empty when several have."""
    ratio, n = run.ratio, len(run.group)
    if ratio is None or n < 2 or not run.rows:
        return ""
    if n > 2 and abs(ratio - 2 * (n - 1) / n) < 0.02:
        return "all_reduce"
    reduces = run.rows[0].redop not in ("", "none")
    if abs(ratio - (n - 1) / n) < 0.02 and n > 2 and reduces:
        return "reduce_scatter"
    return "broadcast" if abs(ratio - 1) < 0.002 and not reduces and (run.rows[0].root or -1) >= 0 else ""


# What NCCL, or RCCL, says of itself with NCCL_DEBUG=INFO: transports, networks, topology file, warnings, by machine.
# Pure.
#
# NCCL picks what works, and says what it picked only here: a cluster whose InfiniBand is gone runs over TCP without an
# error. The forms are those of NVIDIA/nccl @5067397 (src/debug.cc, src/transport/*.cc) and of releases back to 2.4.
# Rows of nccl-tests that stand between these messages are nccl_tests.py's.


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
