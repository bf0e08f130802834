"""What was measured on a cluster, as values: written by the ranks (tasks/jobs/qualify), judged by tasks/qualification/judge.py.

Nothing here says good or bad, with one exception: what a machine says of itself (an Xid, a failed check of AzNHC) is a
finding when it is read. Each rank writes its own file as soon as it knows something, so that a machine that dies
leaves what it said before, and a file that is not there is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tasks.config.qualification import Collective

Status = Literal["measured", "missing", "timed out", "failed", "skipped"]
"""`missing`: there is no way to look, such as no nvidia-smi; `failed`: looking went wrong; `skipped`: nobody asked for it."""


class Measured(BaseModel):
    """Base of what is written and read as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Probe(Measured):
    """One thing that was looked at on one machine."""

    check: str
    """Its name; where the hardware's file has a limit of this name, it is judged by it."""
    status: Status = "measured"
    measured: float | str | None = None
    unit: str = ""
    where: str = ""
    """The part of the machine: GPU 3, mlx5_ib0:1, rank 5. Empty: the machine."""
    finding: Literal["warn", "fail"] | None = None
    """Where what was read is a verdict by itself."""
    said: str = ""
    """Evidence: the line that was read, the error."""
    remedy: str = ""
    source: str = ""
    """Of a finding: whose rule it is."""
    limit: str = ""
    """Of a finding: what it should have been, where that was said, such as >= 460."""
    peers: float | None = None
    """What is compared with other machines instead of `measured`, such as a rate without what other work took."""
    each: tuple[float, ...] = ()
    """What every measurement came to, of which `peers` is the best, where it was made several times."""


M = TypeVar("M", bound=Measured)


class RankReport(Measured):
    """What one rank found. What is a machine's is found by its local rank 0."""

    rank: int
    local_rank: int
    node: str
    """Its machine, by the name that the backend excludes it by (HEADWAY_NODE_NAME)."""
    host: str
    """Its machine's own name."""
    probes: tuple[Probe, ...] = ()
    versions: dict[str, str] = {}
    """Of driver, CUDA, NCCL, MPI, OFED, kernel, torch, image, by name."""
    machine: dict[str, str] = {}
    """Its names at Azure, where it is one of theirs: vm_size, vm_id, vm_name, resource_id, physical_host; and
    `switch`, the leaf switch that it is under, where the scheduler says it."""
    done: tuple[str, ...] = ()
    """Groups of checks that it got through."""


class Row(Measured):
    """One size of a sweep, as nccl-tests print it. Bandwidths in GB/s (10^9 bytes a second); None where it says N/A."""

    bytes: int
    microseconds: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None
    microseconds_in_place: float | None = None
    algbw_in_place: float | None = None
    busbw_in_place: float | None = None
    wrong_in_place: int | None = None


class Sweep(Measured):
    """One run of one collective over one set of ranks."""

    collective: Collective
    scope: Literal["node", "all", "pair", "part"]
    """`part`: some of the machines, when a fault is searched by bisection."""
    nodes: tuple[str, ...]
    ranks: int
    backend: str
    """nccl, rccl or gloo."""
    tool: str
    """What measured: torch, nccl-tests or rccl-tests, with its version where it is known."""
    rows: tuple[Row, ...] = ()
    transport: tuple[str, ...] = ()
    """What the library said that it really used: NET/IB, NET/IB/GDR, NET/Socket, P2P, SHM, NVLS; gloo: tcp/INTERFACE."""
    status: Status = "measured"
    said: str = ""
    round: int = 0
    """0 for the first measurement; more when it was measured again because it was slow."""


class TrainingPoint(Measured):
    """The training probe on some machines."""

    nodes: tuple[str, ...]
    ranks: int
    step_seconds: float | None = None
    """Median of the timed steps."""
    tokens_per_step: int = 0
    tflops_per_rank: float | None = None
    convention: str = ""
    """How FLOPs are counted: megatron."""
    data_share: float | None = None
    communication_share: float | None = None
    compute_share: float | None = None
    engine: str = "torch"
    status: Status = "measured"
    said: str = ""


class Measurement(Measured):
    """All of it."""

    nodes: tuple[str, ...] = ()
    """Machines that were to be measured, by name, as far as they are known."""
    expected_nodes: int = 0
    ranks_per_node: int = 0
    ranks: tuple[RankReport, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    training: tuple[TrainingPoint, ...] = ()
    error: str = ""
    """Why the job ended early, where it did."""
    seconds: float = 0.0


def read_measurement(
    out: Path, *, nodes: int, ranks_per_node: int, error: str = "", seconds: float = 0.0
) -> Measurement:
    """What the ranks left under the job's output: `ranks/R.json`, `sweeps/*.json`, `training/*.json`; without what is broken."""
    ranks = tuple(sorted(_read(out / "ranks", RankReport), key=lambda report: report.rank))
    return Measurement(
        nodes=tuple(dict.fromkeys(report.node for report in ranks)),
        expected_nodes=nodes,
        ranks_per_node=ranks_per_node,
        ranks=ranks,
        sweeps=tuple(_read(out / "sweeps", Sweep)),
        training=tuple(_read(out / "training", TrainingPoint)),
        error=error,
        seconds=seconds,
    )


def _read(folder: Path, kind: type[M]) -> list[M]:
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            results.append(kind.model_validate_json(path.read_bytes()))
        except ValueError:
            continue
    return results
