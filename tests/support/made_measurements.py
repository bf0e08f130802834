"""Measurements and hardware as values, sound unless told otherwise, for tests of the verdict."""

import datetime
import itertools

from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Measurement, Probe, RankReport, Row, Sweep
from tasks.qualification.verdicts import ClusterVerdict

SOURCES = {"page": {"what": "a vendor's page", "date": datetime.date(2026, 11, 21)}}
GPU = Sku.model_validate(
    {
        "name": "gpu",
        "vendor": "nvidia",
        "sources": SOURCES,
        "limits": {
            "gpu_count": {"better": "equal", "fail": 8.0, "source": "page"},
            "matmul_bf16": {"unit": "TFLOP/s", "norm": 769.0, "warn": 740.0, "fail": 715.0, "source": "page"},
            "time_skew": {"unit": "s", "better": "lower", "warn": 1.0, "fail": 5.0, "source": "page"},
        },
        "collectives": [
            {"scope": "node", "bytes": 1 << 30, "norm": 480.0, "warn": 470.0, "fail": 460.0, "source": "page"},
            {"scope": "all", "bytes": 1 << 30, "norm": 470.0, "warn": 450.0, "fail": 400.0, "source": "page"},
        ],
        "transports": {"node": ("P2P", "NVLS"), "pair": ("NET/IB",), "all": ("NET/IB",)},
        "images": [{"urn": "azhpc:22.04", "versions": {"driver": "550.1", "nccl": "2.21.5"}, "source": "page"}],
    }
)
BARE = Sku(name="bare", vendor="nvidia", sources={})
"""Hardware of which nothing is known: only peers judge."""
CPU = Sku(name="local-cpu", vendor="cpu", sources={})
ONLY = ("compute",)
"""Groups of a configuration whose machines did nothing together."""


def names(count: int) -> tuple[str, ...]:
    """node00, node01, ..."""
    return tuple(f"node{number:02}" for number in range(count))


def config(*groups: str, **fields) -> BenchmarkConfig:
    """Of these groups of checks."""
    return BenchmarkConfig.model_validate({"checks": groups, **fields})


def rank(number: int, node: str, *probes: Probe, done=("compute", "collectives", "pairs"), **fields) -> RankReport:
    """One rank's report."""
    fields = {"local_rank": 0, "host": node, **fields}
    return RankReport(rank=number, node=node, probes=probes, done=done, **fields)


def rates(*values: float, check: str = "matmul_bf16", nodes=(), **fields) -> Measurement:
    """One rank a machine, each with one rate."""
    named = nodes or names(len(values))
    made = [
        rank(n, node, Probe(check=check, measured=value, peers=value, unit="TFLOP/s", where=f"rank {n}"))
        for n, (node, value) in enumerate(zip(named, values, strict=True))
    ]
    return together(made, **fields)


def together(ranks, sweeps=(), **fields) -> Measurement:
    """A job's measurement."""
    nodes = tuple(dict.fromkeys(report.node for report in ranks))
    fields = {"nodes": nodes, "expected_nodes": len(nodes), "ranks_per_node": 1, **fields}
    return Measurement(ranks=tuple(ranks), sweeps=tuple(sweeps), **fields)


def quiet(count: int, sweeps=(), **fields) -> Measurement:
    """Machines that finished everything and found nothing of their own, with these sweeps."""
    return together([rank(n, node) for n, node in enumerate(names(count))], sweeps, **fields)


def curve(top: float, *, smallest=1 << 20, count=11, wrong: int | None = 0) -> tuple[Row, ...]:
    """Rows that double up to `smallest` x 2^(count - 1) bytes, and level off at `top` GB/s."""
    return tuple(
        Row(
            bytes=smallest << n,
            microseconds=1.0,
            algbw=rate / 2,
            busbw=rate,
            wrong=wrong,
            algbw_in_place=rate / 2,
            busbw_in_place=rate,
            wrong_in_place=wrong,
        )
        for n in range(count)
        if (rate := top * (1 - 0.5 ** (n + 1)) if n + 1 < count else top)
    )


def sweep(scope: str, nodes, top: float = 475.0, **fields) -> Sweep:
    """A sound sweep of all_reduce over InfiniBand, or NVLink within a machine."""
    used = ("NVLS", "P2P") if len(nodes) == 1 else ("NET/IB/GDR", "P2P")
    made = {"collective": "all_reduce", "backend": "nccl", "tool": "torch", "transport": used, "rows": curve(top)}
    return Sweep(scope=scope, nodes=tuple(nodes), **{"ranks": 8 * len(nodes), **made, **fields})


def tournament(count: int, rate=lambda a, b: 475.0, **fields) -> tuple[Sweep, ...]:
    """Every pair once. `rate(a, b)`: GB/s, by the machines' numbers; None timed out."""
    named = names(count)
    made = []
    for a, b in itertools.combinations(range(count), 2):
        top = rate(a, b)
        lost = {"rows": (), "status": "timed out", "said": "no result in 60 s"} if top is None else {}
        made.append(sweep("pair", (named[a], named[b]), top or 1.0, **{**lost, **fields}))
    return tuple(made)


def found(verdict: ClusterVerdict, *verdicts: str) -> dict[str, list[str]]:
    """Checks that machines have reasons for, by machine; the cluster's under an empty name."""
    every = [*verdict.reasons, *(reason for node in verdict.nodes for reason in node.reasons)]
    wanted = verdicts or ("degraded", "failed", "unknown")
    checks: dict[str, list[str]] = {}
    for reason in every:
        if reason.verdict in wanted:
            checks.setdefault(reason.node, []).append(reason.check)
    return checks


def complete(verdict: ClusterVerdict) -> ClusterVerdict:
    """The same, after a look at every sentence: machine, check, measured, limit, source and remedy are all named."""
    every = [("", reason) for reason in verdict.reasons]
    every += [(node.name, reason) for node in verdict.nodes for reason in node.reasons]
    for name, reason in every:
        assert reason.node == name
        assert reason.check
        assert reason.limit
        assert reason.source
        assert reason.remedy
        assert reason.measured is not None or reason.said
        for part in (name or "the cluster", reason.check, reason.limit, reason.source, reason.verdict):
            assert part in reason.sentence
    return verdict
